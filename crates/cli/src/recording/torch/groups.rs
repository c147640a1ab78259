//! Finds the module and the class of each tensor.
//!
//! Weights, gradients, optimizer states and inputs are recognized by their addresses, which `modules.py` has noted. The
//! others are distinguished by their stacks and their times.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, BufRead, Seek},
    iter,
};

use gpumem_recording::{AllocatorAction as Action, Symbol, TensorClass, TensorGroup};

use super::{
    calls::{Call, Calls},
    history::{DeviceHistory, LiveBlock, LoggedEvent, MarkedTensor, ModuleMark, TorchHistory},
};

/// cuBLAS uses a workspace of this size for each handle and stream (`getChosenWorkspaceSize` in PyTorch's
/// `CublasHandlePool.cpp`): the first size on GPUs before Hopper, the second from Hopper on.
const WORKSPACES: [u64; 2] = [8_519_680, 33_554_432];

/// `modules.py` appends this to the path of a module with weights that autocast may cast.
const AUTOCAST: &str = " [autocast]";

/// The groups of all tensors of a recording.
#[derive(Debug, Default)]
pub(super) struct Groups {
    numbers: HashMap<(Option<String>, Option<TensorClass>), u32>,
}

impl Groups {
    fn number(&mut self, module: Option<&str>, class: Option<TensorClass>) -> u32 {
        if module.is_none() && class.is_none() {
            return 0;
        }
        let next = u32::try_from(self.numbers.len()).unwrap_or(u32::MAX).saturating_add(1);
        *self.numbers.entry((module.map(str::to_owned), class)).or_insert(next)
    }

    /// Returns the items that define the groups in the recording.
    pub(super) fn definitions(self) -> impl Iterator<Item = TensorGroup> {
        self.numbers.into_iter().map(|((module, class), id)| TensorGroup { id, module, class })
    }
}

/// The activity of the program while it allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Activity {
    /// The program runs a module.
    Forward,
    Backward,
    /// The program moves or converts the weights of a module: `Module.cuda`, `to`, `half`.
    Weights,
    /// The program runs an optimizer.
    Optimizer,
    Other,
}

impl Activity {
    /// Returns the activity of a program with this stack. The innermost frame comes first.
    fn of(frames: &[&Symbol]) -> Self {
        let is_in = |frame: &Symbol, file: &str| frame.file.as_ref().is_some_and(|path| path.contains(file));
        let is = |frame: &Symbol, file, name| is_in(frame, file) && frame.function.as_deref() == Some(name);
        match frames.last() {
            // The thread of the backward pass has no Python lines, except in functions that are written in Python.
            None => Self::Backward,
            Some(outermost) if is(outermost, "torch/autograd/function.py", "apply") => Self::Backward,
            _ if frames.iter().any(|frame| is_in(frame, "torch/optim/")) => Self::Optimizer,
            _ if frames.iter().any(|frame| is(frame, "torch/nn/modules/module.py", "_apply")) => Self::Weights,
            _ => Self::Other,
        }
    }
}

/// A tensor of an unknown class.
struct Open {
    /// Its index among the tensors of the device.
    number: usize,
    requested: u64,
    module: u32,
    born_in: Activity,
    /// See [`GroupReading::passes`].
    passes: u64,
    /// The call of the program's function that allocated it.
    call: Option<Call>,
    is_cast: bool,
    marked: Option<(TensorClass, String)>,
}

impl TorchHistory {
    /// Returns the group of each allocation on a device, in the order of [`DeviceHistory::events`]. Empty if the
    /// program was recorded without modules.
    pub(super) fn groups(
        &self,
        device: &DeviceHistory,
        older: &BTreeMap<u64, LiveBlock>,
        from: &mut (impl BufRead + Seek),
        groups: &mut Groups,
    ) -> io::Result<Vec<u32>> {
        if self.marks.is_empty() && self.modules.is_empty() {
            return Ok(Vec::new());
        }
        let mut marks: Vec<(u64, &ModuleMark)> =
            self.marks.iter().flat_map(|mark| mark.times.iter().map(move |time| (*time, mark))).collect();
        marks.sort_by_key(|(time, _)| *time);
        let mut marks = marks.into_iter().peekable();
        let activity_of = |frames: &Vec<u32>| {
            let frames: Vec<_> = frames.iter().filter_map(|frame| self.frames.get(*frame as usize)).collect();
            Activity::of(&frames)
        };
        // Stack 0 has no frames.
        let activities = iter::once(Activity::Backward).chain(self.stacks.iter().map(activity_of)).collect();
        let mut reading = GroupReading {
            history: self,
            activities,
            groups,
            made: Vec::new(),
            activity: Activity::Other,
            passes: 0,
            calls: Calls::new(self),
            casts: HashMap::new(),
        };
        let mut open: BTreeMap<u64, Open> = BTreeMap::new();
        for (address, block) in older {
            let mut tensor = reading.open(block.requested, 0, block.stack);
            // An unknown stack gives no information.
            if block.stack == 0 {
                tensor.born_in = Activity::Other;
            }
            open.insert(*address, tensor);
        }
        for piece in device.trace.pieces(from) {
            for LoggedEvent { action, address, bytes, micros, stack, module, .. } in piece? {
                while let Some((_, mark)) = marks.next_if(|(time, _)| *time < micros) {
                    reading.note(&mut open, mark, device.ordinal);
                }
                match action {
                    Action::Alloc => {
                        let tensor = reading.open(bytes, module, stack);
                        if let Some(before) = open.insert(address, tensor) {
                            reading.close(before, false);
                        }
                    }
                    Action::FreeRequested => {
                        if let Some(tensor) = open.remove(&address) {
                            reading.close(tensor, false);
                        }
                    }
                    _ => {}
                }
            }
        }
        marks.for_each(|(_, mark)| reading.note(&mut open, mark, device.ordinal));
        for tensor in open.into_values() {
            reading.close(tensor, true);
        }
        Ok(reading.made)
    }
}

struct GroupReading<'a> {
    history: &'a TorchHistory,
    /// The activity for each stack, by stack id.
    activities: Vec<Activity>,
    groups: &'a mut Groups,
    made: Vec<u32>,
    /// The activity at the latest allocation.
    activity: Activity,
    /// The number of allocations outside of all modules.
    passes: u64,
    calls: Calls,
    /// For each module and size, the number of casts of its weights that autocast does not currently keep.
    casts: HashMap<(&'a str, u64), u64>,
}

impl<'a> GroupReading<'a> {
    /// Sets the classes of live tensors.
    fn note(&mut self, open: &mut BTreeMap<u64, Open>, mark: &'a ModuleMark, device: u32) {
        for MarkedTensor { class, address, module, is_cast_by_autocast, .. } in
            mark.tensors.iter().filter(|tensor| tensor.device == device)
        {
            if let Some((start, tensor)) = open.range_mut(..=*address).next_back()
                && *address - *start < tensor.requested.max(1)
            {
                if *is_cast_by_autocast && tensor.marked.is_none() {
                    *self.casts.entry((module, tensor.requested / 2)).or_default() += 1;
                }
                // A bucket of gradients has several origins. The first one is used.
                tensor.marked.get_or_insert_with(|| (*class, module.clone()));
            }
        }
    }

    /// Returns the key in `casts` of an allocation in a module.
    fn cast(&self, module: u32, requested: u64) -> Option<(&'a str, u64)> {
        let module = self.history.modules.get(module.checked_sub(1)? as usize)?;
        Some((module.strip_suffix(AUTOCAST)?, requested))
    }

    fn open(&mut self, requested: u64, module: u32, stack: u32) -> Open {
        let of_stack = self.activities.get(stack as usize).copied().unwrap_or(Activity::Other);
        // A checkpoint runs a module during the backward pass.
        self.activity = if module == 0 { of_stack } else { Activity::Forward };
        self.passes += u64::from(module == 0);
        self.made.push(0);
        let number = self.made.len() - 1;
        // A cast takes half the bytes of its weight, and there is one cast at most of each weight.
        let left = self.cast(module, requested).and_then(|cast| self.casts.get_mut(&cast)).filter(|left| **left > 0);
        let is_cast = left.map(|left| *left -= 1).is_some();
        let call = self.calls.allocates(stack);
        Open { number, requested, module, born_in: self.activity, passes: self.passes, call, is_cast, marked: None }
    }

    /// Decides the class of a tensor when it is freed or the recording ends.
    fn close(&mut self, tensor: Open, is_end: bool) {
        let Open { number, requested, module, born_in, passes, call, is_cast, marked } = tensor;
        if let Some(cast) = self.cast(module, requested).filter(|_| is_cast) {
            *self.casts.entry(cast).or_default() += 1;
        }
        let is_in_call = || call.is_some_and(|call| self.calls.is_in(call));
        let class = match (&marked, born_in) {
            (Some((class, _)), _) => Some(*class),
            (None, _) if is_end && WORKSPACES.contains(&requested) => Some(TensorClass::Workspace),
            (None, _) if is_cast => Some(TensorClass::AutocastCasts),
            (None, Activity::Backward) => Some(TensorClass::BackwardTemporary),
            (None, Activity::Weights) => Some(TensorClass::Weights),
            (None, Activity::Optimizer) => Some(TensorClass::Optimizer),
            (None, Activity::Forward) if !is_end && passes == self.passes => Some(TensorClass::ForwardTemporary),
            (None, Activity::Forward) => Some(TensorClass::Activations),
            (None, Activity::Other) if !is_end && self.activity == Activity::Backward => Some(TensorClass::Activations),
            (None, Activity::Other) if !is_end && is_in_call() => Some(TensorClass::Temporary),
            (None, Activity::Other) => None,
        };
        let of_event = || {
            let module = self.history.modules.get(module.checked_sub(1)? as usize)?;
            Some(module.strip_suffix(AUTOCAST).unwrap_or(module))
        };
        let marked = marked.as_ref().map(|(_, module)| module.as_str()).filter(|module| !module.is_empty());
        self.made[number] = self.groups.number(marked.or_else(of_event), class);
    }
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;

    use super::*;

    /// Returns the module and the class of each tensor, in the order of allocation.
    fn groups(events: &str) -> Vec<(Option<String>, Option<TensorClass>)> {
        let mut text = r#"{"torch": "2.11.0", "is_enabled": true, "most": 1000}
{"mark": [10, 90], "tensors": [["weights", 0, 1100, "Net.fc: Linear"], ["gradients", 1, 1100, "Net"]]}
{"mark": [10], "tensors": [["weights", 0, 90000000, "Net.up: Linear", true], ["weights", 0, 99000000, "Net.down: Linear"]]}
{"frame": 0, "file": "train.py", "line": 3, "name": "<module>"}
{"frame": 1, "file": "/x/torch/nn/modules/module.py", "line": 9, "name": "_apply"}
{"frame": 2, "file": "/x/torch/optim/adamw.py", "line": 9, "name": "adamw"}
{"frame": 3, "file": "/x/torch/autograd/function.py", "line": 9, "name": "apply"}
{"frame": 4, "file": "train.py", "line": 8, "name": "step"}
{"frame": 5, "file": "train.py", "line": 9, "name": "step"}
{"frame": 6, "file": "train.py", "line": 4, "name": "<module>"}
{"stack": 1, "frames": [0]}
{"stack": 2, "frames": [1, 0]}
{"stack": 3, "frames": [2, 0]}
{"stack": 4, "frames": [2, 3]}
{"stack": 5, "frames": [4, 0]}
{"stack": 6, "frames": [5, 0]}
{"stack": 7, "frames": [6]}
{"module": 1, "path": "Net"}
{"module": 2, "path": "Net.up: Linear [autocast]"}
{"module": 3, "path": "Net.down: Linear [autocast]"}
{"device": 0}
"#
        .to_owned();
        for event in events.lines() {
            writeln!(text, "[{event}]").unwrap();
        }
        text += "{\"end\": true}\n";
        let mut from = io::Cursor::new(text);
        let history = TorchHistory::read(&mut from, true).unwrap();
        let mut groups = Groups::default();
        let made = history.groups(&history.devices[0], &BTreeMap::new(), &mut from, &mut groups).unwrap();
        let known: HashMap<_, _> = groups.definitions().map(|group| (group.id, (group.module, group.class))).collect();
        made.iter().map(|id| known.get(id).cloned().unwrap_or_default()).collect()
    }

    #[test]
    fn stacks_and_times_say_what_tensors_are_for() {
        use TensorClass::*;
        let net = || Some("Net".to_owned());
        // A mark belongs to the tensor that is at this address at this time.
        let marked = "\"alloc\",1000,200,0,5,1,0\n\"free_requested\",1000,200,0,20,0,0\n\"alloc\",1000,50,0,30,1,0";
        assert_eq!(groups(marked), [(Some("Net.fc: Linear".to_owned()), Some(Weights)), (None, None)]);
        let by_stack = "\"alloc\",1,1,0,5,2,0\n\"alloc\",2,1,0,5,3,0\n\"alloc\",3,1,0,5,4,0\n\"alloc\",4,1,0,5,0,0";
        let expected = [Weights, Optimizer, BackwardTemporary, BackwardTemporary].map(|class| (None, Some(class)));
        assert_eq!(groups(by_stack), expected);
        // One tensor is freed before the forward pass ends. Another one is freed in the backward pass, as the loss is.
        let by_time =
            "\"alloc\",1,1,0,5,1,1\n\"alloc\",2,1,0,6,1,1\n\"free_requested\",1,1,0,7,0,0\n\"alloc\",3,1,0,8,1,0
\"alloc\",4,1,0,9,0,0\n\"free_requested\",3,1,0,11,0,0\n\"free_requested\",2,1,0,11,0,0";
        assert_eq!(
            groups(by_time),
            [
                (net(), Some(ForwardTemporary)),
                (net(), Some(Activations)),
                (None, Some(Activations)),
                (None, Some(BackwardTemporary))
            ]
        );
        // The function is at its next line, has returned, or ends with the program.
        let alloc = |address: u64, stack: u64| format!("\"alloc\",{address},1,0,{address},{stack},0");
        let free = |address: u64, time: u64| format!("\"free_requested\",{address},1,0,{time},0,0");
        let steps = [alloc(1, 5), alloc(2, 6), free(1, 3), alloc(4, 7), free(2, 5), free(4, 6), alloc(7, 7)];
        let expected = [Some(Temporary), None, Some(Temporary), None].map(|class| (None, class));
        assert_eq!(groups(&steps.join("\n")), expected);
        // Autocast keeps a copy of each weight. Another tensor of this size is not a copy, and neither is one for a
        // weight that is not cast.
        let alloc = |at: u64, address: u64, bytes, module| format!("\"alloc\",{address},{bytes},0,{at},1,{module}");
        let free = |at: u64, address: u64| format!("\"free_requested\",{address},1,0,{at},0,0");
        let weights = [alloc(1, 90_000_000, 200, 0), alloc(2, 99_000_000, 90, 0)];
        let casts =
            [alloc(11, 1, 100, 2), alloc(12, 2, 100, 2), free(13, 2), alloc(14, 3, 45, 3), free(15, 3), free(16, 1)];
        let again = [alloc(17, 1, 100, 2)];
        let [up, down] = ["Net.up: Linear", "Net.down: Linear"].map(|path| Some(path.to_owned()));
        assert_eq!(
            groups(&[&weights[..], &casts, &again].concat().join("\n")),
            [
                (up.clone(), Some(Weights)),
                (down.clone(), Some(Weights)),
                (up.clone(), Some(AutocastCasts)),
                (up.clone(), Some(ForwardTemporary)),
                (down, Some(ForwardTemporary)),
                (up, Some(AutocastCasts)),
            ]
        );
        // cuBLAS never frees its workspace.
        assert_eq!(groups("\"alloc\",5000,8519680,0,5,1,1"), [(net(), Some(Workspace))]);
    }
}
