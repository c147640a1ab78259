//! Tensors without values: a shape, strides, a type and a reference to memory.

use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use crate::{Dtype, Shape, memory::Storage, shape::Numbers};

/// A tensor without values. Clones and views share its storage, which is freed with the last of them.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) storage: Rc<Storage>,
    pub(crate) shape: Shape,
    /// For each dimension, the distance between neighbours in elements. `None` if the elements are in order, as in most
    /// tensors.
    strides: Option<Rc<[u64]>>,
    pub(crate) dtype: Dtype,
    /// True if this was created as a view. PyTorch keeps the tensor that the view belongs to.
    pub(crate) is_view: bool,
    /// The destination of the gradient; `None` if the tensor needs none.
    pub(crate) edge: Option<Edge>,
    /// The index of the parameter, if the tensor is one.
    pub(crate) parameter: Option<usize>,
}

/// One output of a node of the backward graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    pub(crate) node: usize,
    pub(crate) output: usize,
}

/// Returns the strides of a tensor whose elements are in order.
pub(crate) fn contiguous_strides(shape: &Shape) -> Numbers {
    let mut strides: Numbers = smallvec![1; shape.rank()];
    for at in (1..shape.rank()).rev() {
        // The element count has been checked, so only shapes without elements can overflow here.
        strides[at - 1] = strides[at].saturating_mul(shape[at].max(1));
    }
    strides
}

/// Returns the strides of an image, (n, c, …), whose channels are adjacent.
pub(crate) fn channels_last_strides(shape: &Shape) -> Numbers {
    let mut sizes = shape.sizes().to_vec();
    if sizes.len() < 2 {
        return contiguous_strides(shape);
    }
    sizes[1..].rotate_left(1);
    let mut strides = contiguous_strides(&sizes.into());
    strides[1..].rotate_right(1);
    strides
}

impl Tensor {
    /// Creates a tensor whose elements are in order.
    pub(crate) fn new(storage: Rc<Storage>, shape: Shape, dtype: Dtype) -> Self {
        Self { storage, shape, strides: None, dtype, is_view: false, edge: None, parameter: None }
    }

    /// Returns the distance between neighbours for each dimension, in elements.
    pub(crate) fn strides(&self) -> Numbers {
        self.strides.as_deref().map_or_else(|| contiguous_strides(&self.shape), Numbers::from_slice)
    }

    /// Returns the same memory with other strides.
    pub(crate) fn with_strides(self, strides: &[u64]) -> Self {
        Self { strides: Some(strides.into()), ..self }
    }

    /// Returns the same memory as an image whose channels are adjacent.
    pub(crate) fn with_channels_last(self) -> Self {
        let strides = channels_last_strides(&self.shape);
        self.with_strides(&strides)
    }

    /// Returns the same memory in another shape, with elements in order.
    pub(crate) fn with_shape(self, shape: Shape) -> Self {
        Self { shape, strides: None, ..self }
    }

    /// Returns a result in the memory order of an input with the same shape, as elementwise operations do.
    pub(crate) fn in_order_of(self, like: &Self) -> Self {
        if like.shape == self.shape && like.is_dense() {
            return Self { strides: like.strides.clone(), ..self };
        }
        self
    }

    /// Returns whether the channels of an image are adjacent: `is_channels_last_strides_2d` and `_3d` in `c10`.
    pub(crate) fn has_channels_last(&self) -> bool {
        let (rank, strides) = (self.shape.rank(), self.strides());
        if !(4..=5).contains(&rank) || strides[1] == 0 {
            return false;
        }
        let mut least = 0;
        for at in std::iter::once(1).chain((2..rank).rev()).chain([0]) {
            let (size, stride) = (self.shape[at], strides[at]);
            // Without this check, an image with one channel or one pixel would pass.
            if size == 0 || stride < least || (at == 0 && least == strides[1]) {
                return false;
            }
            least = stride.saturating_mul(size.max(1));
        }
        true
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        self.strides.is_none() || self.has_strides(&contiguous_strides(&self.shape))
    }

    /// Returns whether the elements are in the order of these strides. That of a dimension of size 1 is irrelevant.
    pub(crate) fn has_strides(&self, expected: &[u64]) -> bool {
        let sizes = self.shape.sizes().iter().zip(self.strides()).zip(expected);
        sizes.into_iter().all(|((size, stride), expected)| *size == 1 || stride == *expected)
    }

    /// Returns whether the elements fill the storage without gaps and overlaps, in any order.
    pub(crate) fn is_dense(&self) -> bool {
        let Some(strides) = &self.strides else { return true };
        let mut dimensions: SmallVec<[_; 4]> =
            strides.iter().zip(self.shape.sizes()).filter(|(_, size)| **size != 1).collect();
        dimensions.sort_unstable();
        let mut expected = 1;
        dimensions.into_iter().all(|(stride, size)| {
            let is_next = *stride == expected;
            expected *= size;
            is_next
        })
    }

    /// Returns whether nothing else refers to the storage. This is never true for a view, because the tensor that it
    /// belongs to refers to the same storage.
    pub(crate) fn is_sole(&self) -> bool {
        !self.is_view && Rc::strong_count(&self.storage) == 1
    }

    /// Returns the same memory as a view.
    pub(crate) fn as_view(&self) -> Self {
        Self { is_view: true, edge: None, parameter: None, ..self.clone() }
    }

    /// Returns the same memory without a place in the backward graph.
    pub(crate) fn detached(&self) -> Self {
        Self { edge: None, ..self.clone() }
    }
}
