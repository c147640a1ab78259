//! The workspaces of NVIDIA's libraries, which PyTorch allocates.

use std::cell::RefCell;

use crate::{Class, Dtype, Eager, Result, Shape, Tensor};

/// The workspace that PyTorch gives cuBLASLt (`CUDABlas.cpp`, `_parseChosenWorkspaceSize`).
const CUBLASLT: u64 = 1 << 20;
/// The largest tile of a result that one multiprocessor computes: 256 × 128 sums in `f32`.
const TILE: u64 = 256 * 128 * 4;

/// The sizes of a convolution.
#[derive(Clone, Debug)]
pub(crate) struct Convolution {
    /// The image, (n, c, …), and the result.
    pub(crate) images: [Shape; 2],
    pub(crate) weight: Shape,
    pub(crate) groups: u64,
    pub(crate) dtype: Dtype,
    /// True if the channels of the image and of the result are adjacent.
    pub(crate) channels_last: bool,
    /// True if the convolution is one matrix product for each image: the window has one pixel and a step of one.
    pub(crate) is_product: bool,
}

impl Convolution {
    /// Returns the largest workspace of any algorithm. Algorithms for tensor cores read images whose channels are
    /// adjacent in groups of 16 bytes; cuDNN copies all other tensors. A sum may be split among multiprocessors, each
    /// with a tile of partial sums. The gradient of the weight of a product may be computed for each image and added up
    /// afterwards.
    fn most(&self, multiprocessors: u64, is_for_weight: bool) -> Option<u64> {
        let group = 16_u64.checked_div(self.dtype.bytes(1)?)?.max(1);
        let mut copies = multiprocessors.checked_mul(TILE)?;
        let images = self.images.iter().map(|shape| (shape, self.groups));
        for (shape, groups) in images.chain([(&self.weight, 1)]) {
            let channels = shape.sizes().get(1).copied().unwrap_or(1).checked_div(groups)?;
            if self.channels_last && channels % group == 0 {
                continue;
            }
            let padded = shape.with(1, channels.checked_next_multiple_of(group)?.checked_mul(groups)?);
            copies = copies.checked_add(self.dtype.bytes(padded.elements()?)?)?;
        }
        if !(self.is_product && is_for_weight) {
            return Some(copies);
        }
        let products = self.weight.elements()?.checked_mul(self.images[0].sizes().first().copied()?)?;
        Some(copies.max(products.checked_mul(4)?))
    }
}

impl Eager {
    /// Allocates the workspace of cuBLAS: each thread that multiplies matrices has one, and keeps it.
    pub(crate) fn use_cublas(&self) -> Result<()> {
        self.keep_workspace(&self.workspaces.cublas, self.step.cublas_workspace)
    }

    /// Allocates the workspace of cuBLASLt, which multiplies matrices and adds a bias: each thread has one, and keeps
    /// it.
    pub(crate) fn use_cublaslt(&self) -> Result<()> {
        let bytes = if self.step.cublas_workspace == 0 { 0 } else { CUBLASLT };
        self.keep_workspace(&self.workspaces.cublaslt, bytes)
    }

    fn keep_workspace(&self, kept: &RefCell<[Option<Tensor>; 2]>, bytes: u64) -> Result<()> {
        let thread = usize::from(self.in_backward.get());
        if kept.borrow()[thread].is_none() {
            let workspace = self.empty(&Shape::from([bytes]), Dtype::U8, Class::Workspace)?;
            kept.borrow_mut()[thread] = Some(workspace);
        }
        Ok(())
    }

    /// Notes a convolution of cuDNN, forward or backward. The workspace depends on the algorithm that cuDNN's
    /// heuristics choose. It ranges from nothing, if the algorithm reads the tensors as they are, to
    /// [`Convolution::most`].
    pub(crate) fn use_cudnn(&self, convolution: &Convolution, is_for_weight: bool) -> Result<()> {
        let bytes = convolution.most(self.step.multiprocessors, is_for_weight).ok_or_else(|| self.too_large())?;
        let largest = &self.workspaces.largest;
        largest.set(largest.get().max(bytes));
        if self.workspaces.convolutions_take_most {
            self.work_in(Some(bytes))?;
        }
        Ok(())
    }

    /// Allocates a workspace that lives while a kernel is started. `None` is a size that is too large.
    pub(crate) fn work_in(&self, bytes: Option<u64>) -> Result<()> {
        let bytes = bytes.ok_or_else(|| self.too_large())?;
        self.empty(&Shape::from([bytes]), Dtype::U8, Class::Workspace).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::Convolution;
    use crate::{dtype::Dtype, shape::Shape};

    const MIB: u64 = 1 << 20;

    #[test]
    fn copies_have_channels_in_groups_of_16_bytes() {
        let images = [Shape::from([8, 3, 224, 224]), Shape::from([8, 64, 112, 112])];
        let weight = Shape::from([64, 3, 7, 7]);
        let first =
            Convolution { images, weight, groups: 1, dtype: Dtype::F32, channels_last: false, is_product: false };
        // 4 channels instead of 3, and 132 tiles of 128 KiB.
        let expected = 8 * (4 * 224 * 224 + 64 * 112 * 112) * 4 + 64 * 4 * 49 * 4 + 132 * 128 * 1024;
        assert_eq!(first.most(132, false), Some(expected));
        let half = Convolution { dtype: Dtype::Bf16, ..first.clone() };
        assert_eq!(half.most(0, false), Some(8 * (8 * 224 * 224 + 64 * 112 * 112) * 2 + 64 * 8 * 49 * 2));
        // A channel that is its own group is padded by itself.
        let images = [Shape::from([1, 96, 56, 56]), Shape::from([1, 96, 56, 56])];
        let weight = Shape::from([96, 1, 7, 7]);
        let depthwise = Convolution { images, weight, groups: 96, channels_last: true, ..first.clone() };
        assert_eq!(depthwise.most(0, false), Some(2 * 4 * 96 * 56 * 56 * 4 + 96 * 4 * 49 * 4));
        let images = [Shape::from([32, 320, 7, 7]), Shape::from([32, 1280, 7, 7])];
        let weight = Shape::from([1280, 320, 1, 1]);
        let product = Convolution { images, weight, dtype: Dtype::Bf16, is_product: true, ..first };
        assert_eq!(product.most(132, true), Some(50 * MIB), "a product for each of 32 images");
        assert!(product.most(132, false) < Some(25 * MIB));
    }
}
