//! The memory that NVIDIA's libraries work in. PyTorch allocates it.

use std::cell::{Cell, RefCell};

use super::{Eager, Tensor};
use crate::{class::Class, dtype::Dtype, error::Error, shape::Shape};

/// What the libraries take.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Libraries {
    /// The workspace of cuBLAS. 0: none has a workspace.
    pub(crate) cublas: u64,
    /// The multiprocessors of the card.
    pub(crate) multiprocessors: u64,
    /// Each convolution takes the most that cuDNN may want, instead of nothing.
    pub(crate) convolutions_take_most: bool,
}

/// The workspace that PyTorch gives cuBLASLt (`CUDABlas.cpp`, `_parseChosenWorkspaceSize`).
const CUBLASLT: u64 = 1 << 20;
/// The largest tile of a result that one multiprocessor computes: 256 × 128 sums in `f32`.
const TILE: u64 = 256 * 128 * 4;

#[derive(Debug, Default)]
pub(super) struct Workspaces {
    libraries: Libraries,
    /// Of each thread: the first runs the forward pass, the second the backward pass.
    cublas: RefCell<[Option<Tensor>; 2]>,
    cublaslt: RefCell<[Option<Tensor>; 2]>,
    /// The most that a convolution may take.
    largest: Cell<u64>,
}

impl Workspaces {
    pub(super) fn new(libraries: Libraries) -> Self {
        Self { libraries, ..Self::default() }
    }
}

/// A tensor of a convolution: (images, channels, height, width), or a weight (outputs, inputs, height, width).
pub(crate) type Sizes<'a> = &'a Shape;

impl Eager {
    /// The workspace of cuBLAS: each thread that multiplies matrices has one and keeps it.
    pub(crate) fn use_cublas(&self) -> Result<(), Error> {
        self.keep_workspace(&self.workspaces.cublas, self.workspaces.libraries.cublas)
    }

    /// The same of cuBLASLt, which multiplies matrices where a bias is added.
    pub(crate) fn use_cublaslt(&self) -> Result<(), Error> {
        let bytes = if self.workspaces.libraries.cublas == 0 { 0 } else { CUBLASLT };
        self.keep_workspace(&self.workspaces.cublaslt, bytes)
    }

    fn keep_workspace(&self, kept: &RefCell<[Option<Tensor>; 2]>, bytes: u64) -> Result<(), Error> {
        let thread = usize::from(self.in_backward.get());
        if kept.borrow()[thread].is_none() {
            let workspace = self.empty(&Shape::from([bytes]), Dtype::U8, Class::Workspace)?;
            kept.borrow_mut()[thread] = Some(workspace);
        }
        Ok(())
    }

    /// cuDNN convolves, forward or backward, with an image, a weight and a result. What it takes depends on the algorithm that its
    /// heuristics choose. An algorithm that reads the tensors as they are takes nothing. The others take copies of all three tensors
    /// with the channels last and in groups of 16 bytes, and a partial sum for each multiprocessor.
    pub(crate) fn use_cudnn(&self, tensors: [Sizes<'_>; 3], dtype: Dtype, channels_last: bool) -> Result<(), Error> {
        let bits = dtype.bytes(1).unwrap_or(4).max(1);
        let group = (16 / bits).max(1);
        let mut bytes = self.workspaces.libraries.multiprocessors.saturating_mul(TILE);
        for shape in tensors {
            let mut sizes = shape.sizes().to_vec();
            let channels = sizes.get_mut(1);
            let Some(channels) = channels else { continue };
            let is_even = *channels % group == 0;
            *channels = channels.next_multiple_of(group);
            let copy = Shape::from(sizes).elements().and_then(|elements| dtype.bytes(elements)).unwrap_or(u64::MAX);
            if !channels_last || !is_even {
                bytes = bytes.saturating_add(copy);
            }
        }
        let largest = &self.workspaces.largest;
        largest.set(largest.get().max(bytes));
        if self.workspaces.libraries.convolutions_take_most {
            drop(self.empty(&Shape::from([bytes]), Dtype::U8, Class::Workspace)?);
        }
        Ok(())
    }

    pub(crate) fn multiprocessors(&self) -> u64 {
        self.workspaces.libraries.multiprocessors
    }

    /// The most that a convolution may have taken as its workspace; 0 if there was none.
    pub(crate) fn largest_convolution_workspace(&self) -> u64 {
        self.workspaces.largest.get()
    }
}
