//! The layers that the backward pass runs again.

use serde::{Deserialize, Serialize};

use super::Names;

/// The layers that the backward pass runs again, so that their tensors need not stay in memory.
///
/// All variants use `torch.utils.checkpoint` with `use_reentrant=False`: the input of the layers that run again stays
/// in memory.
///
/// A group must not start with a layer that overwrites its input, such as `relu` in place: PyTorch rejects its backward pass, and
/// estimating it is an error.
///
/// ```
/// use gpumem_estimate::{Checkpointing, Optimizer, Step, models};
///
/// let peak = |checkpointing| {
///     let step = Step { checkpointing, ..Step::training(32, Optimizer::Sgd) };
///     step.estimate(&models::vgg19()).map(|estimate| estimate.peak)
/// };
/// assert!(peak(Checkpointing::Segments(4))? < peak(Checkpointing::Off)?);
/// # Ok::<(), gpumem_estimate::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Checkpointing {
    /// No layer runs again.
    #[default]
    Off,
    /// Each block by itself, as `gradient_checkpointing_enable` of transformers does.
    Blocks,
    /// This many consecutive blocks run again together. The last group may be smaller. 0 is an error.
    Every(usize),
    /// `checkpoint_sequential`: the blocks are split into this many segments of equal length. The last segment gets the
    /// remaining blocks and does not run again. 0 is an error.
    Segments(usize),
    /// As many segments as the square root of the number of blocks, rounded up: a sequence of n blocks keeps about √n
    /// inputs of segments and the tensors of one segment.
    SquareRoot,
    /// The layers with these names. A name that matches no layer is an error.
    Layers(Names),
}

/// `true` means each block.
impl From<bool> for Checkpointing {
    fn from(is_on: bool) -> Self {
        if is_on { Self::Blocks } else { Self::Off }
    }
}

impl Checkpointing {
    /// Splits this many blocks into groups. Returns the length of each group, and whether it runs again. The list is
    /// empty for variants that do not group blocks.
    pub(crate) fn groups(&self, blocks: usize) -> Vec<(usize, bool)> {
        match self {
            Self::Every(length) => {
                let length = (*length).max(1);
                (0..blocks).step_by(length).map(|first| (length.min(blocks - first), true)).collect()
            }
            Self::Segments(segments) => sequential(blocks, *segments),
            Self::SquareRoot => {
                let root = blocks.isqrt();
                sequential(blocks, if root * root == blocks { root } else { root + 1 })
            }
            Self::Off | Self::Blocks | Self::Layers(_) => Vec::new(),
        }
    }
}

/// Splits blocks as `torch.utils.checkpoint.checkpoint_sequential` does: `segment_size = len(functions) // segments`.
fn sequential(blocks: usize, segments: usize) -> Vec<(usize, bool)> {
    let length = blocks / segments.max(1);
    // If there are more segments than blocks, only PyTorch's last segment contains blocks.
    let before = if length == 0 { 0 } else { segments.max(1) - 1 };
    let mut groups = vec![(length, true); before];
    groups.push((blocks - length * before, false));
    groups
}

#[cfg(test)]
mod tests {
    use super::Checkpointing;

    #[test]
    fn groups_are_those_of_pytorch() {
        let all = |length, count| vec![(length, true); count];
        assert_eq!(Checkpointing::Every(4).groups(12), all(4, 3));
        assert_eq!(Checkpointing::Every(5).groups(12), [(5, true), (5, true), (2, true)]);
        // The 37 layers of VGG19 are in 7 segments: `range(0, 5 * 6, 5)`, and layers 30 to 36 at the end.
        assert_eq!(Checkpointing::SquareRoot.groups(37), [all(5, 6), vec![(7, false)]].concat());
        assert_eq!(Checkpointing::SquareRoot.groups(36), [all(6, 5), vec![(6, false)]].concat());
        assert_eq!(Checkpointing::Segments(1).groups(12), [(12, false)]);
        assert_eq!(Checkpointing::Segments(13).groups(12), [(12, false)]);
    }
}
