//! Matrix products, with one weight or with those of many experts at once, and rows of tables.

use smallvec::{SmallVec, smallvec};

use crate::{
    Class, Dtype, Eager, Result, Shape, Tensor,
    eager::{Grads, Saved},
    ensure,
};

impl Eager {
    /// Runs `F.linear`. The weight has the shape (outputs, inputs).
    pub(crate) fn linear(&self, input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (outputs, inputs) = (weight.shape[0], weight.shape[1]);
        let rank = input.shape.rank();
        let fits = rank > 0 && input.shape.last() == inputs;
        ensure(fits, || self.mismatch(format!("({}{inputs})", "…, ".repeat(rank.max(1) - 1)), input))?;
        let (input, weight) = (self.lowered(input)?, self.lowered(weight)?);
        let bias = bias.map(|bias| self.lowered(bias)).transpose()?;
        self.use_cublas()?;
        let input = self.contiguous(&input)?;
        let mut all: SmallVec<[_; 3]> = smallvec![&input, &weight];
        all.extend(&bias);
        let saved = self.save_factors(&input, &weight)?;
        let output = self.output(&input.shape.with_last(outputs), input.dtype)?;
        if bias.is_some() {
            self.use_cublaslt()?;
        }
        let likes = Like::of_all(&[&input, &weight]);
        let is_of_rows = input.shape.rank() > 2;
        let bias_needs = bias.as_ref().map(|bias| bias.edge.is_some());
        Ok(self.recorded(&all, output, move |eager, grad| {
            eager.use_cublas()?;
            let _saved = eager.unpack(saved)?;
            // The product has two dimensions. If the input has more, its gradient is a view of the product. PyTorch
            // multiplies by the transposed weight, so the gradient of the weight is a view as well.
            let mut results = eager.gradients(&likes)?;
            for (result, is_view) in results.iter_mut().zip([is_of_rows, true]) {
                *result = result.take().map(|grad| if is_view { grad.as_view() } else { grad });
            }
            // The gradient is summed later, when it is checked against the shape of the bias.
            results.extend(bias_needs.map(|needs| needs.then(|| grad.clone().with_shape(grad.shape.clone()))));
            Ok(results)
        }))
    }

    /// Multiplies matrices in batches: (…, n, k) and (…, k, m).
    pub(crate) fn matmul(&self, first: &Tensor, second: &Tensor) -> Result<Tensor> {
        let (rank, sizes) = (first.shape.rank(), second.shape.sizes());
        let fits = rank >= 2
            && sizes.len() == rank
            && first.shape[rank - 1] == sizes[rank - 2]
            && first.shape[..rank - 2] == sizes[..rank - 2];
        ensure(fits, || self.pair("a matrix product", &first.shape, &second.shape))?;
        let (first, second) = (self.lowered(first)?, self.lowered(second)?);
        self.use_cublas()?;
        let saved = self.save_factors(&first, &second)?;
        let output = self.output(&first.shape.with_last(sizes[rank - 1]), first.dtype)?;
        let likes = Like::of_all(&[&first, &second]);
        Ok(self.recorded(&[&first, &second], output, move |eager, _| {
            eager.use_cublas()?;
            let _saved = eager.unpack(saved)?;
            eager.gradients(&likes)
        }))
    }

    /// Runs `grouped_mm`: groups of rows (n, inputs) are multiplied by their weights (groups, outputs, inputs).
    /// Autocast does not cover this operation: the rows get the type of the weights.
    pub(crate) fn grouped_product(&self, rows: &Tensor, weights: &Tensor) -> Result<Tensor> {
        let fits = rows.shape.rank() == 2 && weights.shape.rank() == 3 && rows.shape[1] == weights.shape[2];
        ensure(fits, || self.pair("a product with the weights of experts", &rows.shape, &weights.shape))?;
        let rows = self.to(rows, weights.dtype)?;
        let saved = self.save_factors(&rows, weights)?;
        let output = self.output(&Shape::from([rows.shape[0], weights.shape[1]]), rows.dtype)?;
        Ok(self.with_gradients(&[&rows, weights], output, saved))
    }

    /// Returns rows of a table. The gradient of the table is as large as the table.
    pub(crate) fn embedding(&self, indices: &Tensor, table: &Tensor) -> Result<Tensor> {
        let invalid = || self.invalid(format!("an embedding needs integers and gets {}", indices.dtype));
        ensure(!indices.dtype.is_float(), invalid)?;
        // More than 3072 indices are sorted.
        self.rows_at(indices, table, 3072)
    }

    /// Returns rows of a tensor in another order: `input[index]`. Its gradient is always sorted (`index_put_` with
    /// accumulation).
    pub(crate) fn rows(&self, input: &Tensor, index: &Tensor) -> Result<Tensor> {
        self.rows_at(index, input, 0)
    }

    /// Returns rows of a tensor, and keeps their indices. The gradient is as large as the tensor. More indices than
    /// `most` are sorted for it, which takes two copies of the indices and two of their positions.
    pub(super) fn rows_at(&self, indices: &Tensor, table: &Tensor, most: u64) -> Result<Tensor> {
        let saved = self.save_all(&[table], [indices])?;
        let mut sizes = indices.shape.sizes().to_vec();
        sizes.extend(&table.shape[1..]);
        let output = self.output(&sizes.into(), table.dtype)?;
        let (likes, indices) = (Like::of_all(&[table]), indices.shape.clone());
        Ok(self.recorded(&[table], output, move |eager, _| {
            let _indices = eager.unpack(saved)?;
            let grads = eager.gradients(&likes)?;
            if indices.elements().is_none_or(|count| count > most) {
                let _sorted = (0..4).map(|_| eager.integers(&indices)).collect::<Result<Vec<_>, _>>()?;
            }
            Ok(grads)
        }))
    }

    /// Records an operation that needs the saved tensors to compute new tensors: the gradients of its inputs.
    pub(super) fn with_gradients(&self, inputs: &[&Tensor], output: Tensor, saved: Vec<Saved>) -> Tensor {
        let likes = Like::of_all(inputs);
        self.recorded(inputs, output, move |eager, _| {
            let _saved = eager.unpack(saved)?;
            eager.gradients(&likes)
        })
    }

    /// Allocates gradients for the inputs that need one.
    pub(super) fn gradients(&self, likes: &[Option<Like>]) -> Result<Grads> {
        likes.iter().map(|like| like.as_ref().map(|like| like.empty(self)).transpose()).collect()
    }
}

/// The shape and type of an input, without its memory.
#[derive(Clone, Debug)]
pub(crate) struct Like {
    pub(crate) shape: Shape,
    pub(crate) dtype: Dtype,
    is_parameter: bool,
}

impl Like {
    pub(crate) fn of(input: &Tensor) -> Self {
        Self { shape: input.shape.clone(), dtype: input.dtype, is_parameter: input.parameter.is_some() }
    }

    /// Returns the shape and type of each input that needs a gradient.
    pub(super) fn of_all(inputs: &[&Tensor]) -> Vec<Option<Self>> {
        inputs.iter().map(|input| input.edge.map(|_| Self::of(input))).collect()
    }

    /// Returns the class of a gradient for the input.
    pub(crate) fn class(&self) -> Class {
        if self.is_parameter { Class::Gradients } else { Class::Activations }
    }

    /// Allocates a gradient for the input.
    pub(super) fn empty(&self, eager: &Eager) -> Result<Tensor> {
        eager.empty(&self.shape, self.dtype, self.class())
    }
}
