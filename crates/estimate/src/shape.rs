//! Sizes of the dimensions of a tensor.

use std::{fmt, ops::Index, slice::SliceIndex};

use gpumem_core::model;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

/// One number for each dimension.
pub(crate) type Numbers = SmallVec<[u64; 4]>;

/// The sizes of a tensor's dimensions, the outermost first.
#[derive(Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "Vec<u64>", into = "Vec<u64>")]
pub struct Shape(Numbers);

impl Shape {
    /// Returns the number of elements of a tensor of this shape. `None` if it exceeds 64 bits.
    pub fn elements(&self) -> Option<u64> {
        self.0.iter().try_fold(1_u64, |product, size| product.checked_mul(*size))
    }

    /// Returns the number of dimensions.
    pub fn rank(&self) -> usize {
        self.0.len()
    }

    /// Returns the sizes.
    pub fn sizes(&self) -> &[u64] {
        &self.0
    }

    /// Returns the size of the last dimension; 1 if there is none.
    pub fn last(&self) -> u64 {
        self.0.last().copied().unwrap_or(1)
    }

    /// Returns the same shape, but with this size of a dimension, if there is such a dimension.
    pub(crate) fn with(&self, dimension: usize, size: u64) -> Self {
        let mut shape = self.clone();
        if let Some(old) = shape.0.get_mut(dimension) {
            *old = size;
        }
        shape
    }

    /// Returns the same shape, but with this size of the last dimension.
    pub(crate) fn with_last(&self, size: u64) -> Self {
        self.with(self.rank().wrapping_sub(1), size)
    }

    /// Returns the shape that both have after broadcasting. `None` if they cannot be broadcast.
    pub(crate) fn broadcast(&self, other: &Self) -> Option<Self> {
        let rank = self.rank().max(other.rank());
        let size = |shape: &Self, at: usize| match at.checked_sub(rank - shape.rank()) {
            Some(at) => shape.0[at],
            None => 1,
        };
        let both = (0..rank).map(|at| match (size(self, at), size(other, at)) {
            (first, second) if first == second || second == 1 => Some(first),
            (1, second) => Some(second),
            _ => None,
        });
        both.collect::<Option<_>>().map(Self)
    }
}

/// Copies all sizes at once. The derived `Clone` would copy them one by one.
impl Clone for Shape {
    fn clone(&self) -> Self {
        Self(Numbers::from_slice(&self.0))
    }
}

impl<I: SliceIndex<[u64]>> Index<I> for Shape {
    type Output = I::Output;

    fn index(&self, at: I) -> &I::Output {
        &self.0[at]
    }
}

impl<S: AsRef<[u64]>> From<S> for Shape {
    fn from(sizes: S) -> Self {
        Self(Numbers::from_slice(sizes.as_ref()))
    }
}

impl From<Shape> for Vec<u64> {
    fn from(Shape(sizes): Shape) -> Self {
        sizes.into_vec()
    }
}

/// Prints `(64, 3, 3, 3)`.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<_> = self.0.iter().map(|size| usize::try_from(*size).unwrap_or(usize::MAX)).collect();
        model::Shape(&sizes).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::Shape;

    #[test]
    fn elements_do_not_overflow() {
        assert_eq!(Shape::from([2, 3, 4]).elements(), Some(24));
        assert_eq!(Shape::default().elements(), Some(1), "a number has no dimensions");
        assert_eq!(Shape::from([1 << 32, 1 << 32]).elements(), None);
    }

    #[test]
    fn shapes_broadcast_as_in_pytorch() {
        let both = |a: &[u64], b: &[u64]| Shape::from(a.to_vec()).broadcast(&Shape::from(b.to_vec())).map(Vec::from);
        assert_eq!(both(&[2, 1, 4], &[3, 1]), Some(vec![2, 3, 4]));
        assert_eq!(both(&[], &[5]), Some(vec![5]));
        assert_eq!(both(&[2], &[3]), None);
    }
}
