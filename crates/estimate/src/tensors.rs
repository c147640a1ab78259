//! The tensors of a model: names, types and sizes.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::{Bytes, Dtype, Shape};

/// The tensors of a model, as a file or a [`Model`](crate::Model) describes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tensors {
    pub(crate) all: Vec<TensorInfo>,
}

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TensorInfo {
    /// Its name, such as `model.layers.0.mlp.up_proj.weight`.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape.
    pub shape: Shape,
    /// Its bytes.
    pub bytes: Bytes,
}

/// A sum over tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct TensorSum {
    /// The number of their elements.
    pub elements: u64,
    /// Their bytes.
    pub bytes: Bytes,
}

impl Tensors {
    pub(crate) fn new(mut all: Vec<TensorInfo>) -> Self {
        all.sort_by(|a, b| a.name.cmp(&b.name));
        Self { all }
    }

    /// Creates the tensors of a file, each of which has less than 2^62 bytes. Returns an error if two have the same name, or if the
    /// sum is too large for the ledger.
    pub(crate) fn checked(all: Vec<TensorInfo>) -> Result<Self, String> {
        let tensors = Self::new(all);
        if let Some(pair) = tensors.all.windows(2).find(|pair| pair[0].name == pair[1].name) {
            return Err(format!("the tensor `{}` occurs twice", pair[0].name));
        }
        let sum = tensors.all.iter().try_fold(0_u64, |sum, tensor| sum.checked_add(tensor.bytes.get()));
        sum.filter(|sum| *sum < 1 << 62).ok_or("the tensors have more than 2^62 bytes")?;
        Ok(tensors)
    }

    /// Returns all tensors, sorted by name.
    pub fn all(&self) -> &[TensorInfo] {
        &self.all
    }

    /// Returns the sum over all tensors.
    pub fn sum(&self) -> TensorSum {
        self.all.iter().fold(TensorSum::default(), TensorSum::with)
    }

    /// Returns the sums by type of elements.
    pub fn by_dtype(&self) -> BTreeMap<String, TensorSum> {
        self.by(|tensor| tensor.dtype.to_string())
    }

    /// Returns the sums by module: by the first `depth` parts of the names.
    pub fn by_module(&self, depth: usize) -> BTreeMap<String, TensorSum> {
        self.by(|tensor| tensor.name.split('.').take(depth).collect::<Vec<_>>().join("."))
    }

    /// Returns the type that most elements have, if it can be the type of a model's parameters.
    pub(crate) fn dtype(&self) -> Option<Dtype> {
        let most = self.by_dtype().into_iter().max_by_key(|(_, sum)| sum.elements);
        let dtype: Option<Dtype> = most.and_then(|(name, _)| name.parse().ok());
        dtype.filter(|dtype| dtype.is_float() || dtype.is_only_stored())
    }

    fn by(&self, key: impl Fn(&TensorInfo) -> String) -> BTreeMap<String, TensorSum> {
        let mut groups: BTreeMap<String, TensorSum> = BTreeMap::new();
        for tensor in &self.all {
            let sum = groups.entry(key(tensor)).or_default();
            *sum = sum.with(tensor);
        }
        groups
    }
}

impl TensorSum {
    /// Returns the sum with one more tensor. The readers have checked that it fits.
    fn with(self, tensor: &TensorInfo) -> Self {
        let elements = self.elements.saturating_add(tensor.shape.elements().unwrap_or(u64::MAX));
        Self { elements, bytes: self.bytes + tensor.bytes }
    }
}
