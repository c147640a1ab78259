use std::rc::Rc;

use smallvec::{SmallVec, smallvec};

use crate::{
    dtype::Dtype,
    memory::Storage,
    shape::{Numbers, Shape},
};

/// A tensor without values. Clones and views share the storage, which is freed with the last of them.
#[derive(Clone, Debug)]
pub(crate) struct Tensor {
    pub(crate) storage: Rc<Storage>,
    pub(crate) shape: Shape,
    /// How many elements apart two neighbours of each dimension are.
    pub(crate) strides: Numbers,
    pub(crate) dtype: Dtype,
    /// It was made as a view, so PyTorch keeps the tensor that it is a view of.
    pub(crate) is_view: bool,
    /// Where the gradient goes; `None` if it needs none.
    pub(crate) edge: Option<Edge>,
    /// The number of the parameter that this is, if it is one.
    pub(crate) parameter: Option<usize>,
}

/// One output of a node of the backward graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    pub(crate) node: usize,
    pub(crate) output: usize,
}

/// The strides of a tensor whose elements lie in order.
pub(crate) fn contiguous_strides(shape: &Shape) -> Numbers {
    let mut strides: Numbers = smallvec![1; shape.rank()];
    for at in (1..shape.rank()).rev() {
        // The element count was checked, so only shapes without elements can overflow here.
        strides[at - 1] = strides[at].saturating_mul(shape[at].max(1));
    }
    strides
}

/// The strides of an image, (n, c, …), whose channels lie next to each other.
pub(crate) fn channels_last_strides(shape: &Shape) -> Numbers {
    let mut sizes = shape.sizes().to_vec();
    if sizes.len() < 2 {
        return contiguous_strides(shape);
    }
    let channels = sizes.remove(1);
    sizes.push(channels);
    let mut strides = contiguous_strides(&sizes.into());
    let channels = strides.pop().unwrap_or(1);
    strides.insert(1, channels);
    strides
}

impl Tensor {
    /// The channels of an image lie next to each other: `is_channels_last_strides_2d` and `_3d` of `c10`.
    pub(crate) fn has_channels_last(&self) -> bool {
        let rank = self.shape.rank();
        if !(4..=5).contains(&rank) || self.strides[1] == 0 {
            return false;
        }
        let mut least = 0;
        for at in std::iter::once(1).chain((2..rank).rev()).chain([0]) {
            let (size, stride) = (self.shape[at], self.strides[at]);
            // Without this, an image with one channel or one pixel would count.
            if size == 0 || stride < least || (at == 0 && least == self.strides[1]) {
                return false;
            }
            least = stride.saturating_mul(size.max(1));
        }
        true
    }

    pub(crate) fn is_contiguous(&self) -> bool {
        let expected = contiguous_strides(&self.shape);
        let sizes = self.shape.sizes().iter().zip(&self.strides).zip(&expected);
        sizes.into_iter().all(|((size, stride), expected)| *size == 1 || stride == expected)
    }

    /// Its elements fill the storage without gaps and overlaps, in whatever order.
    pub(crate) fn is_dense(&self) -> bool {
        let mut dimensions: SmallVec<[_; 4]> =
            self.strides.iter().zip(self.shape.sizes()).filter(|(_, size)| **size != 1).collect();
        dimensions.sort_unstable();
        let mut expected = 1;
        dimensions.into_iter().all(|(stride, size)| {
            let is_next = *stride == expected;
            expected *= size;
            is_next
        })
    }

    /// Nothing else refers to its storage. A view is never alone: the tensor that it is a view of refers to the same storage.
    pub(crate) fn is_sole(&self) -> bool {
        !self.is_view && Rc::strong_count(&self.storage) == 1
    }

    /// The same tensor as if its elements lay in order.
    pub(crate) fn in_order(&self) -> Self {
        Self { strides: contiguous_strides(&self.shape), ..self.clone() }
    }

    /// The same memory as a view.
    pub(crate) fn as_view(&self) -> Self {
        Self { is_view: true, edge: None, parameter: None, ..self.clone() }
    }

    /// The same memory without a place in the backward graph.
    pub(crate) fn detached(&self) -> Self {
        Self { edge: None, ..self.clone() }
    }
}
