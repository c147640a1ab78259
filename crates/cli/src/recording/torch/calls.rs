//! Derives the calls of the program's functions from the stacks of its allocations. Frees have no stack.

use std::collections::HashMap;

use gpumem_core::model::Frame;
use gpumem_recording::Symbol;

use super::history::TorchHistory;

/// A call of a function. It ends when the program allocates outside of it. Consecutive calls from one line count as one
/// call, because their stacks are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Call {
    depth: usize,
    number: u64,
}

/// A function of the program on a stack, and the line that it is at.
type Level = (u32, u32);

/// The calls that the program is currently in.
pub(super) struct Calls {
    /// The functions of each stack, starting with id 1, the outermost function first. Functions of packages are left
    /// out.
    paths: Vec<Vec<Level>>,
    current: Vec<(Level, u64)>,
    count: u64,
}

impl Calls {
    pub(super) fn new(history: &TorchHistory) -> Self {
        let mut functions = HashMap::new();
        let mut level = |symbol: &Symbol| {
            let next = u32::try_from(functions.len()).unwrap_or(u32::MAX);
            let function = functions.entry((symbol.file.clone(), symbol.function.clone())).or_insert(next);
            (*function, symbol.line.unwrap_or(0))
        };
        let is_of_program = |symbol: &&Symbol| {
            let frame = Frame { file: symbol.file.clone(), ..Frame::default() };
            frame.is_python() && !frame.is_of_python_package()
        };
        let levels: Vec<Option<Level>> =
            history.frames.iter().map(|symbol| is_of_program(&symbol).then(|| level(symbol))).collect();
        let path = |frames: &Vec<u32>| {
            let of_frames = frames.iter().rev().filter_map(|frame| *levels.get(*frame as usize)?);
            of_frames.collect()
        };
        Self { paths: history.stacks.iter().map(path).collect(), current: Vec::new(), count: 0 }
    }

    /// Notes that the program allocates with this stack. Returns the innermost call; `None` if the stack contains no
    /// function of the program.
    pub(super) fn allocates(&mut self, stack: u32) -> Option<Call> {
        let path = self.paths.get(stack.checked_sub(1)? as usize).filter(|path| !path.is_empty())?;
        let mut kept = 0;
        for ((function, line), ((current, last), _)) in path.iter().zip(&mut self.current) {
            if function != current {
                break;
            }
            kept += 1;
            if line != last {
                *last = *line;
                break;
            }
        }
        self.current.truncate(kept);
        for level in &path[kept..] {
            self.count += 1;
            self.current.push((*level, self.count));
        }
        Some(Call { depth: path.len() - 1, number: self.current[path.len() - 1].1 })
    }

    /// Returns whether the program is still in a call.
    pub(super) fn is_in(&self, call: Call) -> bool {
        self.current.get(call.depth).is_some_and(|(_, number)| *number == call.number)
    }
}
