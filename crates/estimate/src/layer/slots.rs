//! Layers that are connected to distant layers, and layers that convert between images and tokens.

use super::{Built, Layer, PositionKind, run_all};
use crate::{
    class::Class,
    dtype::Dtype,
    eager::{Eager, Tensor},
    error::{Error, Kind},
    shape::Shape,
};

impl Built {
    pub(super) fn connected(&self, eager: &Eager, input: &Tensor) -> Result<Tensor, Error> {
        match &self.kind {
            Layer::AsRows => rows_of(eager, input).map(|rows| eager.transpose(&rows, 1, 2)),
            Layer::AsTokens { .. } => self.as_tokens(eager, input),
            Layer::ImageFromPatches { channels, patch } => image_from_patches(eager, input, *channels, *patch),
            Layer::Positions { kind, .. } => self.positions(eager, input, *kind),
            Layer::Leave { slot } => {
                eager.leave(slot, input.clone(), false);
                Ok(input.clone())
            }
            Layer::Derive { from, slot, .. } => {
                let source = eager.left(from)?;
                eager.leave(slot, run_all(&self.children, eager, &source)?, true);
                Ok(input.clone())
            }
            Layer::Provide { slot, sizes, integers, is_next, .. } => {
                let mut shape = vec![input.shape.sizes().first().copied().unwrap_or(1)];
                shape.extend(sizes);
                let numbers = if input.dtype.is_float() { input.dtype } else { Dtype::F32 };
                let dtype = if *integers { Dtype::I64 } else { numbers };
                let provided = eager.empty(&shape.into(), dtype, Class::Inputs)?;
                let output = run_all(&self.children, eager, &provided)?;
                if *is_next {
                    return Ok(output);
                }
                eager.leave(slot, output, true);
                Ok(input.clone())
            }
            Layer::Join { slot, joined } => {
                let left = eager.take_left(slot)?;
                eager.leave(joined, left.clone(), false);
                eager.concatenate(&[input, &left], 1)
            }
            Layer::Release { slot } => {
                eager.release(slot);
                Ok(input.clone())
            }
            Layer::AddLeft { slot, .. } => {
                let left = run_all(&self.children, eager, &eager.left(slot)?)?;
                eager.add(input, &eager.with_rank(&left, input.shape.rank())?)
            }
            Layer::ScaleByLeft { slot, parts } => {
                let vector = vector(eager, slot, *parts, input)?;
                eager.multiply(&vector, input)
            }
            Layer::Modulate { slot, parts } => {
                let scale = eager.add_number(&vector(eager, slot, *parts, input)?)?;
                let scaled = eager.multiply(input, &scale)?;
                eager.add(&scaled, &vector(eager, slot, *parts, input)?)
            }
            Layer::Similarity { slot } => {
                let others = eager.unit_vectors(&eager.left(slot)?)?;
                let vectors = eager.unit_vectors(input)?;
                let products = eager.matmul(&vectors, &eager.transpose(&others, 0, 1))?;
                eager.multiply(&products, &self.parameter(eager, 0))
            }
            _ => Err(eager.error(Kind::Invalid("this layer is not connected with others".to_owned()))),
        }
    }

    fn as_tokens(&self, eager: &Eager, input: &Tensor) -> Result<Tensor, Error> {
        let rows = rows_of(eager, input)?;
        let (batch, pixels) = (rows.shape[0], rows.shape[2]);
        let output = run_all(&self.children, eager, &eager.transpose(&rows, 1, 2))?;
        drop(rows);
        if output.shape.rank() != 3 || output.shape[1] != pixels {
            return Err(eager.mismatch(format!("(…, {pixels}, …)"), &output));
        }
        let channels = output.shape[2];
        let image = eager.contiguous(&eager.transpose(&output, 1, 2))?;
        eager.reshape(&image, &Shape::from([batch, channels, input.shape[2], input.shape[3]]))
    }

    fn positions(&self, eager: &Eager, input: &Tensor, kind: PositionKind) -> Result<Tensor, Error> {
        let table = self.parameter(eager, 0);
        let tokens = if input.shape.rank() == 3 { input.shape[1] } else { 0 };
        if input.shape.last() != table.shape[1] || tokens == 0 || tokens > table.shape[0] {
            let (rows, size) = (table.shape[0], table.shape[1]);
            return Err(eager.mismatch(format!("(…, {rows} or less, {size})"), input));
        }
        if kind == PositionKind::Buffer {
            let sum = eager.add(input, &table)?;
            return eager.to(&sum, input.dtype);
        }
        let rows = eager.embedding(&eager.integers(&Shape::from([tokens]))?, &table)?;
        eager.add(input, &rows)
    }
}

/// Returns (n, c, h, w) as (n, c, h * w). PyTorch's permuted image is a view with the same strides.
fn rows_of(eager: &Eager, input: &Tensor) -> Result<Tensor, Error> {
    if input.shape.rank() != 4 {
        return Err(eager.mismatch("(…, …, …, …)", input));
    }
    let pixels = input.shape[2].checked_mul(input.shape[3]).ok_or_else(|| eager.error(Kind::TooLarge))?;
    eager.reshape(input, &Shape::from([input.shape[0], input.shape[1], pixels]))
}

/// Returns one of the vectors that were left side by side, (batch, parts * size), for the tokens of a sequence.
fn vector(eager: &Eager, slot: &str, parts: u64, tokens: &Tensor) -> Result<Tensor, Error> {
    let left = eager.left(slot)?;
    let size = tokens.shape.last();
    let fits = left.shape.rank() == 2 && size.checked_mul(parts) == Some(left.shape[1]);
    if !fits || tokens.shape.rank() != 3 || tokens.shape[0] != left.shape[0] {
        let (first, second) = (tokens.shape.clone(), left.shape);
        return Err(eager.error(Kind::Pair { operation: "a vector for each sequence", first, second }));
    }
    let part = eager.narrow(&left, 1, size);
    Ok(eager.view(&part, &Shape::from([left.shape[0], 1, size])))
}

/// Converts (n, h * w, patch * patch * channels) to (n, channels, h * patch, w * patch), with a copy.
fn image_from_patches(eager: &Eager, input: &Tensor, channels: u64, patch: u64) -> Result<Tensor, Error> {
    let side = if input.shape.rank() == 3 { input.shape[1].isqrt() } else { 0 };
    let expected = patch.checked_mul(patch).and_then(|pixels| pixels.checked_mul(channels));
    if side * side != input.shape.sizes().get(1).copied().unwrap_or(0) || Some(input.shape.last()) != expected {
        return Err(eager.mismatch(format!("(…, …, {patch} * {patch} * {channels})"), input));
    }
    let batch = input.shape[0];
    let all = eager.reshape(input, &Shape::from([batch, side, side, patch, patch, channels]))?;
    // The order changes from nhwpqc to nchpwq.
    let mut image = eager.transpose(&all, 1, 5);
    image = eager.transpose(&image, 2, 5);
    image = eager.transpose(&image, 4, 5);
    let image = eager.contiguous(&image)?;
    eager.reshape(&image, &Shape::from([batch, channels, side * patch, side * patch]))
}
