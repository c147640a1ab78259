//! The PyTorch phase in which a function runs.

/// A part of a program's work that the names of its functions do not show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// PyTorch's backward pass.
    BackwardPass,
    /// A part of the forward pass, which a checkpoint runs again in the backward pass.
    Recomputation,
    /// The thread of a `DataLoader` that copies to pinned memory.
    PinThread,
}

impl Phase {
    /// Returns the text after the name of a place in this phase.
    pub const fn in_brackets(self) -> &'static str {
        match self {
            Self::BackwardPass => " (backward pass)",
            Self::Recomputation => " (recomputed for a checkpoint)",
            Self::PinThread => " (pin thread of a DataLoader)",
        }
    }

    /// Returns whether the name of this place ends in a phase in brackets.
    pub fn is_in(place: &str) -> bool {
        [Self::BackwardPass, Self::Recomputation, Self::PinThread]
            .iter()
            .any(|phase| place.ends_with(phase.in_brackets()))
    }
}
