//! Finds the line of the program that started the backward pass in which a tensor was allocated.
//!
//! PyTorch runs a backward pass on its own threads, while the thread that started it waits. `torch.py` notes when
//! passes run and which stacks start them. For an allocation in a pass, the functions of the stack that started the
//! pass are added to the allocation's stack as callers.

use std::collections::{BTreeMap, HashMap};

use gpumem_recording::Symbol;

/// A backward pass, or several passes with the same times.
#[derive(Clone, Copy, Debug)]
pub(super) struct BackwardPass {
    /// When the pass started and ended, in microseconds.
    pub(super) times: (u64, u64),
    /// The id of the stack that started the pass.
    pub(super) stack: u32,
}

/// The stacks of a history, including those that were joined from two.
#[derive(Debug)]
pub(super) struct Stacks<'a> {
    /// The frames of each stack, starting with id 1.
    frames: &'a [Vec<u32>],
    /// For each stack, true if it belongs to one of PyTorch's own threads. The index is the stack id.
    is_of_pytorch: Vec<bool>,
    /// Times, each with the stack that started all passes running from then on. `None` if no pass runs, or if different
    /// stacks started them.
    passes: Vec<(u64, Option<u32>)>,
    /// The ids of joined stacks, by the stack of the allocation and the one that started its pass.
    made: HashMap<(u32, u32), u32>,
}

/// A joined stack has at most this many frames.
const MOST_FRAMES: usize = 128;

impl<'a> Stacks<'a> {
    pub(super) fn new(symbols: &[Symbol], frames: &'a [Vec<u32>], passes: &[BackwardPass]) -> Self {
        let is_of_pytorch = |stack: &Vec<u32>| {
            let outermost = stack.last().and_then(|frame| symbols.get(*frame as usize)?.function.as_deref());
            // These functions are the outermost ones of Python programs and threads.
            !matches!(outermost, Some("<module>" | "_run_module_as_main" | "_bootstrap"))
        };
        let is_of_pytorch = std::iter::once(true).chain(frames.iter().map(is_of_pytorch)).collect();
        let ends = |pass: &BackwardPass| {
            let (start, end) = pass.times;
            [(start, true, pass.stack), (end.max(start).saturating_add(1), false, pass.stack)]
        };
        let mut changes: Vec<_> = passes.iter().flat_map(ends).collect();
        changes.sort_unstable();
        let mut running: BTreeMap<u32, u64> = BTreeMap::new();
        let passes = changes.into_iter().map(|(time, is_start, stack)| {
            let count = running.entry(stack).or_default();
            *count = if is_start { *count + 1 } else { count.saturating_sub(1) };
            if *count == 0 {
                running.remove(&stack);
            }
            (time, running.keys().next().copied().filter(|stack| running.len() == 1 && *stack != 0))
        });
        let passes = passes.collect();
        Self { frames, is_of_pytorch, passes, made: HashMap::new() }
    }

    /// Returns the stack for an allocation: the given one, or a joined one that continues where the pass was started.
    pub(super) fn of_allocation(&mut self, stack: u32, micros: u64) -> u32 {
        if !self.is_of_pytorch.get(stack as usize).is_some_and(|is| *is) {
            return stack;
        }
        let after = self.passes.partition_point(|(time, _)| *time <= micros);
        let Some((_, Some(started_by))) = after.checked_sub(1).map(|at| self.passes[at]) else { return stack };
        let next = u32::try_from(self.frames.len() + self.made.len() + 1).unwrap_or(u32::MAX);
        *self.made.entry((stack, started_by)).or_insert(next)
    }

    /// Returns the joined stacks with their ids.
    pub(super) fn made(&self) -> impl Iterator<Item = (u32, Vec<u32>)> {
        let frames =
            |stack: u32| stack.checked_sub(1).and_then(|at| self.frames.get(at as usize)).into_iter().flatten();
        let both =
            move |inside, started_by| frames(inside).chain(frames(started_by)).copied().take(MOST_FRAMES).collect();
        self.made.iter().map(move |((inside, started_by), number)| (*number, both(*inside, *started_by)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn symbol(function: &str) -> Symbol {
        Symbol { function: Some(function.to_owned()), file: None, line: None, column: None }
    }

    #[test]
    fn stacks_of_pytorch_go_on_where_one_pass_started() {
        let frames = ["<module>", "_bootstrap", "backward", "train"].map(symbol);
        // The first two stacks start passes, the third is in a pass, and the last is elsewhere.
        let stacks = [vec![3, 0], vec![3, 1], vec![2], vec![2, 0]];
        let pass = |start, end, stack| BackwardPass { times: (start, end), stack };
        let passes =
            [pass(10, 20, 1), pass(15, 17, 1), pass(30, 40, 1), pass(35, 50, 2), pass(60, 60, 2), pass(70, 80, 0)];
        let mut known = Stacks::new(&frames, &stacks, &passes);
        // Returns the stack of an allocation at a time.
        let mut at = |stack, micros| {
            let number = known.of_allocation(stack, micros);
            known.made().find(|(made, _)| *made == number).map(|(_, frames)| frames)
        };
        let first = Some(vec![3, 0]);
        assert_eq!(
            [9, 10, 16, 18, 20, 21].map(|time| at(0, time)),
            [None, first.clone(), first.clone(), first.clone(), first.clone(), None]
        );
        // Two passes run at once, so it is not known which one allocates.
        assert_eq!([34, 35, 40, 41].map(|time| at(0, time)), [first, None, None, Some(vec![3, 1])]);
        assert_eq!((at(3, 60), at(4, 60), at(0, 75), at(99, 60)), (Some(vec![2, 3, 1]), None, None, None));
    }
}
