//! Which module each tensor belongs to, and what it is for.
//!
//! Weights, gradients, states of optimizers and inputs are known by their addresses, which `modules.py` has noted. The others are told apart by
//! when they came and went, as `TensorClass` says.

use std::{
    collections::{BTreeMap, HashMap},
    io::{self, BufRead, Seek},
};

use gpumem_core::recording::{AllocatorAction as Action, TensorClass, TensorGroup};

use super::history::{DeviceHistory, LiveBlock, LoggedEvent, Mark, MarkedTensor, TorchHistory};

/// cuBLAS works in this much, once for each handle and stream: `getChosenWorkspaceSize` in `CublasHandlePool.cpp` of PyTorch, on cards
/// before Hopper and from it on.
const WORKSPACES: [u64; 2] = [8_519_680, 33_554_432];

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

    /// What the recording says of them.
    pub(super) fn definitions(self) -> impl Iterator<Item = TensorGroup> {
        self.numbers.into_iter().map(|((module, class), id)| TensorGroup { id, module, class })
    }
}

/// What the program does while it allocates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Forward,
    Backward,
    Other,
}

/// A tensor whose class is not known yet.
struct Open {
    /// Its number among the tensors of the device.
    number: usize,
    requested: u64,
    module: u32,
    born_in: Phase,
    /// See [`GroupReading::passes`].
    passes: u64,
    marked: Option<(TensorClass, String)>,
}

impl TorchHistory {
    /// The group of each allocation on a device, in the order in which [`DeviceHistory::events`] has them. Empty if the program was recorded
    /// without modules.
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
        let mut marks: Vec<(u64, &Mark)> =
            self.marks.iter().flat_map(|mark| mark.times.iter().map(move |time| (*time, mark))).collect();
        marks.sort_by_key(|(time, _)| *time);
        let mut marks = marks.into_iter().peekable();
        let mut reading = GroupReading { history: self, groups, made: Vec::new(), phase: Phase::Other, passes: 0 };
        let mut open: BTreeMap<u64, Open> = BTreeMap::new();
        for (address, block) in older {
            open.insert(*address, reading.open(block.requested, 0, block.stack));
        }
        for piece in device.trace.pieces(from) {
            for LoggedEvent { action, address, bytes, micros, stack, module, .. } in piece? {
                while let Some((_, mark)) = marks.next_if(|(time, _)| *time < micros) {
                    note(&mut open, mark, device.ordinal);
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
        marks.for_each(|(_, mark)| note(&mut open, mark, device.ordinal));
        open.into_values().for_each(|tensor| reading.close(tensor, true));
        Ok(reading.made)
    }
}

/// Says of the tensors that are live what they are.
fn note(open: &mut BTreeMap<u64, Open>, mark: &Mark, device: u32) {
    for MarkedTensor { class, address, module, .. } in mark.tensors.iter().filter(|tensor| tensor.device == device) {
        if let Some((begin, tensor)) = open.range_mut(..=*address).next_back()
            && *address - *begin < tensor.requested.max(1)
        {
            // A bucket of gradients has several. The first one counts.
            tensor.marked.get_or_insert_with(|| (*class, module.clone()));
        }
    }
}

struct GroupReading<'a> {
    history: &'a TorchHistory,
    groups: &'a mut Groups,
    made: Vec<u32>,
    /// Of the newest allocation.
    phase: Phase,
    /// How often something was allocated outside of all modules.
    passes: u64,
}

impl GroupReading<'_> {
    fn open(&mut self, requested: u64, module: u32, stack: u32) -> Open {
        self.phase = match (module, stack) {
            // The thread of the backward pass has no line of Python, unless a checkpoint runs a module again.
            (0, 0) => Phase::Backward,
            (0, _) => Phase::Other,
            _ => Phase::Forward,
        };
        self.passes += u64::from(module == 0);
        self.made.push(0);
        let number = self.made.len() - 1;
        Open { number, requested, module, born_in: self.phase, passes: self.passes, marked: None }
    }

    /// The tensor is freed, or the recording ends.
    fn close(&mut self, tensor: Open, is_end: bool) {
        let Open { number, requested, module, born_in, passes, marked } = tensor;
        let class = match (&marked, born_in) {
            (Some((class, _)), _) => Some(*class),
            (None, _) if is_end && WORKSPACES.contains(&requested) => Some(TensorClass::Workspace),
            (None, Phase::Backward) => Some(TensorClass::BackwardTemporary),
            (None, Phase::Forward) if !is_end && passes == self.passes => Some(TensorClass::ForwardTemporary),
            (None, Phase::Forward) => Some(TensorClass::Activations),
            (None, Phase::Other) if !is_end && self.phase == Phase::Backward => Some(TensorClass::Activations),
            (None, Phase::Other) => None,
        };
        let of_event = || self.history.modules.get(module.checked_sub(1)? as usize).map(String::as_str);
        let marked = marked.as_ref().map(|(_, module)| module.as_str()).filter(|module| !module.is_empty());
        self.made[number] = self.groups.number(marked.or_else(of_event), class);
    }
}
