//! Linear layers with adapters, and with 4-bit weights.

use super::{ParameterId, Role};
use crate::{Dtype, Eager, Error, Quantized, Result, Shape, Step, Tensor, ensure};

/// The tensors that a linear layer has in addition to its weight, or instead of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Adapted {
    pub(crate) in_4_bits: Option<In4Bits>,
    /// `lora_A` and `lora_B`.
    adapter: Option<[ParameterId; 2]>,
    dropout: f64,
}

/// A 4-bit weight.
#[derive(Clone, Debug)]
pub(crate) struct In4Bits {
    outputs: u64,
    inputs: u64,
    pub(crate) packed: ParameterId,
    /// The number of scales, if they are quantized as well.
    quantized_scales: Option<u64>,
    compute: Dtype,
}

/// The number of elements that share a scale.
const BLOCK: u64 = 64;
/// The number of scales that share a scale.
const BLOCK_OF_SCALES: u64 = 256;

impl Eager {
    /// Adds the tensors that a linear layer has in addition to its weight, or instead of it.
    pub(crate) fn adapt(&self, inputs: u64, outputs: u64, dtype: Dtype, is_tied: bool) -> Result<Adapted> {
        let Step { adapters: lora, quantized, .. } = &self.step;
        if lora.is_none() && quantized.is_none() {
            return Ok(Adapted::default());
        }
        let path = self.memory.path();
        let mut adapted = Adapted::default();
        if let Some(quantized) = quantized.as_ref().filter(|quantized| !is_tied && !quantized.except.contains(&path)) {
            adapted.in_4_bits = Some(self.add_in_4_bits(inputs, outputs, quantized)?);
        }
        if let Some(lora) = lora.as_ref().filter(|lora| lora.targets.contains(&path)) {
            let dtype = if matches!(dtype, Dtype::F16 | Dtype::Bf16) { Dtype::F32 } else { dtype };
            let add = |sizes: [u64; 2]| self.add_tensor(Role::Adapter, &sizes.into(), [dtype; 2]);
            adapted.adapter = Some([add([lora.rank, inputs])?, add([outputs, lora.rank])?]);
            adapted.dropout = lora.dropout;
        }
        self.linear.borrow_mut().push(path);
        Ok(adapted)
    }

    /// Returns an error if a name of the adapters matches no linear layer.
    pub(crate) fn check_adapters(&self) -> Result<()> {
        let Some(lora) = &self.step.adapters else { return Ok(()) };
        let linear = self.linear.borrow();
        let Some(unused) = lora.targets.unused(&linear) else { return Ok(()) };
        let mut names: Vec<_> = linear.iter().filter_map(|path| path.rsplit('.').next()).collect();
        names.sort_unstable();
        names.dedup();
        let what = format!("adapters: no linear layer has the name `{unused}`; there are {}", names.join(", "));
        Err(Error::invalid(what))
    }

    /// Adds packed elements and a `QuantState`, like bitsandbytes' `quantize_4bit`.
    fn add_in_4_bits(&self, inputs: u64, outputs: u64, quantized: &Quantized) -> Result<In4Bits> {
        let elements = inputs.checked_mul(outputs).ok_or_else(|| self.too_large())?;
        let packed = self.add_tensor(Role::Frozen, &Shape::from([elements.div_ceil(2), 1]), [Dtype::U8; 2])?;
        self.parameters.borrow_mut()[packed.0].packed_elements = Some(elements);
        let flat = |length: u64, dtype| self.add_tensor(Role::Buffer, &Shape::from([length]), [dtype; 2]);
        let scales = elements.div_ceil(BLOCK);
        // The 16 numbers that 4 bits can represent.
        flat(16, Dtype::F32)?;
        if quantized.double {
            flat(scales, Dtype::U8)?;
            flat(scales.div_ceil(BLOCK_OF_SCALES), Dtype::F32)?;
            // `offset`: the mean of all scales.
            self.add_tensor(Role::Buffer, &Shape::default(), [Dtype::F32; 2])?;
        } else {
            flat(scales, Dtype::F32)?;
        }
        let quantized_scales = quantized.double.then_some(scales);
        Ok(In4Bits { outputs, inputs, packed, quantized_scales, compute: quantized.compute })
    }

    /// Runs `Linear4bit.forward`: the input is converted to the type of the products, multiplied, and the result is
    /// converted to the type of the input.
    pub(crate) fn linear_in_4_bits(&self, input: &Tensor, weight: &In4Bits, bias: Option<&Tensor>) -> Result<Tensor> {
        let fits = input.shape.rank() != 0 && input.shape.last() == weight.inputs;
        ensure(fits, || self.mismatch(format!("(…, {})", weight.inputs), input))?;
        let narrow = self.contiguous(&self.to(input, weight.compute)?)?;
        let bias = bias.map(|bias| self.to(bias, weight.compute)).transpose()?;
        self.use_cublas()?;
        // `MatMul4Bit.forward` frees the wide weight after the product. No input is saved, because the weight has no
        // gradient.
        let wide = self.widened(weight)?;
        let output = self.output(&narrow.shape.with_last(weight.outputs), weight.compute)?;
        drop(wide);
        let mut inputs = vec![&narrow];
        inputs.extend(&bias);
        let weight = weight.clone();
        let shapes: Vec<_> = inputs.iter().map(|input| input.edge.map(|_| input.shape.clone())).collect();
        let output = self.recorded(&inputs, output, move |eager, _| {
            let gradient = |(at, shape): (usize, &Option<Shape>)| {
                let Some(shape) = shape else { return Ok(None) };
                // The first input is the one that is multiplied, and the second one is the bias.
                let _wide = if at == 0 { Some(eager.widened(&weight)?) } else { None };
                if at == 0 {
                    eager.use_cublas()?;
                }
                eager.output(shape, weight.compute).map(Some)
            };
            shapes.iter().enumerate().map(gradient).collect()
        });
        drop(narrow);
        self.to(&output, input.dtype)
    }

    /// Runs `dequantize_4bit`. If the scales are quantized as well, they come first.
    fn widened(&self, weight: &In4Bits) -> Result<Tensor> {
        let scales = weight.quantized_scales.map(|scales| self.output(&Shape::from([scales]), Dtype::F32));
        let _scales = scales.transpose()?;
        self.output(&Shape::from([weight.outputs, weight.inputs]), weight.compute)
    }

    /// Runs the adapter of a linear layer: `forward` of peft's `lora.Linear` and `lora.Linear4bit`.
    pub(crate) fn adapted(&self, adapted: &Adapted, input: &Tensor, output: Tensor) -> Result<Tensor> {
        let Some([first, second]) = adapted.adapter else { return Ok(output) };
        let [first, second] = [first, second].map(|number| self.parameter(number));
        let dtype = output.dtype;
        let in_4_bits = adapted.in_4_bits.is_some();
        // The source code explains: "For 4bit, we need to defensively clone here."
        let output = if in_4_bits { self.copied(&output)? } else { output };
        let is_converted = !in_4_bits || self.autocast_dtype().is_none();
        let input = if is_converted { self.to(input, first.dtype)? } else { input.clone() };
        let small = self.linear(&self.dropout(&input, adapted.dropout)?, &first, None)?;
        let large = self.linear(&small, &second, None)?;
        drop(small);
        let scaled = self.multiply_by_number(&large)?;
        drop(large);
        if in_4_bits {
            let scaled = if is_converted { self.to(&scaled, dtype)? } else { scaled };
            return self.add(&output, &scaled);
        }
        let sum = self.add(&output, &scaled)?;
        drop((output, scaled));
        self.to(&sum, dtype)
    }
}
