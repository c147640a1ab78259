//! Matrix products and embeddings.

use smallvec::{SmallVec, smallvec};

use crate::{
    dtype::Dtype,
    eager::{Eager, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

impl Eager {
    /// `F.linear`: the weight has the shape (outputs, inputs).
    pub(crate) fn linear(&self, input: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor, Error> {
        let (outputs, inputs) = (weight.shape[0], weight.shape[1]);
        if input.shape.rank() == 0 || input.shape.last() != inputs {
            let mut expected: Vec<_> = vec!["…".to_owned(); input.shape.rank().saturating_sub(1)];
            expected.push(inputs.to_string());
            return Err(self.mismatch(format!("({})", expected.join(", ")), input));
        }
        let (input, weight) = (self.lowered(input)?, self.lowered(weight)?);
        let bias = bias.map(|bias| self.lowered(bias)).transpose()?;
        self.use_cublas()?;
        let input = self.contiguous(&input)?;
        let mut all: SmallVec<[_; 3]> = smallvec![&input, &weight];
        all.extend(&bias);
        let needs = self.needs_grad(&all);
        let weight_saved = (needs && input.edge.is_some()).then(|| self.save(&weight)).transpose()?;
        let input_saved = (needs && weight.edge.is_some()).then(|| self.save(&input)).transpose()?;
        let output = self.output(&input.shape.with_last(outputs), input.dtype)?;
        if bias.is_some() {
            self.use_cublaslt()?;
        }
        if !needs {
            return Ok(output);
        }
        let (input_like, weight_like) = (Like::of(&input), Like::of(&weight));
        let bias_needs = bias.as_ref().map(|bias| bias.edge.is_some());
        let [output] = self.record(&all, [output], move |eager, grads| {
            let count = 2 + usize::from(bias_needs.is_some());
            let Some(grad) = &grads[0] else { return Ok(vec![None; count]) };
            eager.use_cublas()?;
            let mut results = Vec::with_capacity(count);
            let weight = weight_saved.map(|saved| saved.unpack(eager)).transpose()?;
            let input = input_saved.map(|saved| saved.unpack(eager)).transpose()?;
            // The product has two dimensions; the gradient of an input with more is a view of it. PyTorch multiplies with the
            // transposed weight, so that the gradient of the weight is a view as well.
            let in_rows = |grad: Tensor| if input_like.shape.rank() > 2 { grad.as_view() } else { grad };
            results.push(weight.as_ref().map(|_| input_like.empty(eager).map(in_rows)).transpose()?);
            results.push(input.as_ref().map(|_| weight_like.empty(eager).map(|grad| grad.as_view())).transpose()?);
            if let Some(needs) = bias_needs {
                // It is summed where the gradient is checked against the shape of the bias.
                results.push(needs.then(|| grad.in_order()));
            }
            Ok(results)
        });
        Ok(output)
    }

    /// A product of matrices in batches: (…, n, k) and (…, k, m).
    pub(crate) fn matmul(&self, first: &Tensor, second: &Tensor) -> Result<Tensor, Error> {
        let pair =
            || Kind::Pair { operation: "a matrix product", first: first.shape.clone(), second: second.shape.clone() };
        let (rank, sizes) = (first.shape.rank(), second.shape.sizes());
        if rank < 2 || sizes.len() != rank || first.shape[rank - 1] != sizes[rank - 2] {
            return Err(self.error(pair()));
        }
        if first.shape.sizes()[..rank - 2] != sizes[..rank - 2] {
            return Err(self.error(pair()));
        }
        let (first, second) = (self.lowered(first)?, self.lowered(second)?);
        self.use_cublas()?;
        let needs = self.needs_grad(&[&first, &second]);
        let second_saved = (needs && first.edge.is_some()).then(|| self.save(&second)).transpose()?;
        let first_saved = (needs && second.edge.is_some()).then(|| self.save(&first)).transpose()?;
        let output = self.output(&first.shape.with_last(sizes[rank - 1]), first.dtype)?;
        if !needs {
            return Ok(output);
        }
        let (first_like, second_like) = (Like::of(&first), Like::of(&second));
        let [output] = self.record(&[&first, &second], [output], move |eager, grads| {
            if grads[0].is_none() {
                return Ok(vec![None, None]);
            }
            eager.use_cublas()?;
            let second = second_saved.map(|saved| saved.unpack(eager)).transpose()?;
            let first = first_saved.map(|saved| saved.unpack(eager)).transpose()?;
            let first_grad = second.as_ref().map(|_| first_like.empty(eager)).transpose()?;
            Ok(vec![first_grad, first.as_ref().map(|_| second_like.empty(eager)).transpose()?])
        });
        Ok(output)
    }

    /// Rows of a table. The gradient of the table is as large as the table.
    pub(crate) fn embedding(&self, indices: &Tensor, table: &Tensor) -> Result<Tensor, Error> {
        if indices.dtype.is_float() {
            return Err(self.error(Kind::Invalid(format!("an embedding needs integers and gets {}", indices.dtype))));
        }
        let needs = self.needs_grad(&[table]);
        let saved = needs.then(|| self.save(indices)).transpose()?;
        let mut sizes = indices.shape.sizes().to_vec();
        sizes.push(table.shape.last());
        let output = self.output(&sizes.into(), table.dtype)?;
        let Some(saved) = saved else { return Ok(output) };
        let like = Like::of(table);
        let [output] = self.record(&[table], [output], move |eager, grads| {
            if grads[0].is_none() {
                return Ok(vec![None]);
            }
            let indices = saved.unpack(eager)?;
            let grad = like.empty(eager)?;
            let count = indices.shape.elements().unwrap_or(u64::MAX);
            // With more than 3072 indices they are sorted: two copies of the indices and two of their positions.
            if count > 3072 {
                let _sorted = (0..4).map(|_| eager.integers(&Shape::from([count]))).collect::<Result<Vec<_>, _>>()?;
            }
            Ok(vec![Some(grad)])
        });
        Ok(output)
    }
}

/// The shape and type of an input, without its memory.
#[derive(Clone, Debug)]
pub(super) struct Like {
    shape: Shape,
    dtype: Dtype,
    is_parameter: bool,
}

impl Like {
    pub(super) fn of(input: &Tensor) -> Self {
        Self { shape: input.shape.clone(), dtype: input.dtype, is_parameter: input.parameter.is_some() }
    }

    pub(super) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// A gradient of the input.
    pub(super) fn empty(&self, eager: &Eager) -> Result<Tensor, Error> {
        let class = if self.is_parameter { crate::Class::Gradients } else { crate::Class::Activations };
        eager.empty(&self.shape, self.dtype, class)
    }
}
