//! The contexts of the process, and the number by which blocks refer to their context.

use std::collections::HashMap;

use crate::sys::calls::Context;

/// The device and the number of a context. Blocks that are allocated in the context carry both.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) device: u32,
    /// The number of the context in its blocks, counted from 1; 0 if there are too many contexts to number this one.
    pub(super) number: u8,
}

#[derive(Debug, Default)]
pub(super) struct Contexts {
    owners: HashMap<Context, Owner>,
    /// The handles of contexts that may have ended while nothing was intercepted. The blocks of such a context stay live until a context
    /// with the same handle ends.
    maybe_ended: Vec<(usize, Owner)>,
    /// Whether each number is in use; the first element is for number 1.
    numbers: Vec<bool>,
}

impl Contexts {
    pub(super) fn get(&self, context: Context) -> Option<Owner> {
        self.owners.get(&context).copied()
    }

    /// Moves contexts without an id to `maybe_ended`: such a context may have ended, and another context may have its
    /// handle now.
    pub(super) fn forget_unnumbered(&mut self) {
        let unnumbered = self.owners.extract_if(|context, _| context.uid == 0);
        self.maybe_ended.extend(unnumbered.map(|(context, owner)| (context.handle, owner)));
    }

    /// Assigns the lowest free number to a context, unless another thread already did.
    pub(super) fn number(&mut self, context: Context, device: u32) -> Owner {
        if let Some(owner) = self.owners.get(&context) {
            return *owner;
        }
        let free = self.numbers.iter().position(|taken| !taken).unwrap_or(self.numbers.len());
        let number = u8::try_from(free + 1).unwrap_or(0);
        if number > 0 {
            self.numbers.resize(self.numbers.len().max(free + 1), false);
            self.numbers[free] = true;
        }
        let owner = Owner { device, number };
        self.owners.insert(context, owner);
        owner
    }

    /// Removes the contexts with this handle. There are several if both sources have seen the context and each gave it a number.
    pub(super) fn remove(&mut self, handle: usize) -> Vec<Owner> {
        let certain = self.owners.extract_if(|context, _| context.handle == handle).map(|(_, owner)| owner);
        let possible = self.maybe_ended.extract_if(.., |(of, _)| *of == handle).map(|(_, owner)| owner);
        certain.chain(possible).collect()
    }

    /// Releases a number that no block carries any more.
    pub(super) fn release_number(&mut self, number: u8) {
        self.numbers[usize::from(number) - 1] = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_context_that_two_threads_number_has_one_number() {
        let mut contexts = Contexts::default();
        let [first, second] = [1, 2].map(|handle| Context { handle, uid: 1 });
        for (context, number) in [(first, 1), (first, 1), (second, 2)] {
            assert_eq!(contexts.number(context, 0), Owner { device: 0, number });
        }
        assert_eq!(contexts.numbers, [true, true]);
    }
}
