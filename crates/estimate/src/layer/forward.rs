//! Layers with parameters, and their forward pass.

use std::rc::Rc;

use super::{Embeddings, Function, Layer, Linear};
use crate::{
    Class, Dtype, Eager, Kind, Result, Shape, Tensor,
    eager::{Adapted, ParameterId, Saves},
    ensure,
};

/// Runs a model. The tensors that its layers share are freed when the output exists.
pub(crate) fn run_model(layers: &[Rc<Built>], eager: &Eager, input: &Tensor) -> Result<Tensor> {
    let output = run_all(layers, eager, input)?;
    eager.slots.borrow_mut().retain(|name, _| ["encoder", "target"].contains(&name.as_str()));
    eager.free_shared();
    Ok(output)
}

/// Runs layers one after the other.
pub(crate) fn run_all(layers: &[Rc<Built>], eager: &Eager, input: &Tensor) -> Result<Tensor> {
    let mut current = input.clone();
    for (at, layer) in layers.iter().enumerate() {
        // This is the head, the outermost last layer. The earlier part of the model has returned, so the variables of
        // its function are gone.
        if at > 0 && at + 1 == layers.len() && eager.memory.layers().is_empty() {
            eager.free_shared();
        }
        current = layer.forward(eager, &current)?;
    }
    Ok(current)
}

/// A layer with its parameters and the layers inside it.
#[derive(Debug)]
pub(crate) struct Built {
    pub(crate) name: String,
    pub(super) kind: Layer,
    pub(super) parameters: Vec<ParameterId>,
    /// The tensors that a linear layer has in addition to its weight, or instead of it.
    pub(super) adapted: Adapted,
    /// The group of a block whose parameters are gathered from several ranks.
    pub(super) group: Option<usize>,
    pub(super) children: Vec<Rc<Built>>,
    /// The layers on the shortcut of a residual layer, or the decoder of an encoder-decoder layer.
    pub(super) shortcut: Vec<Rc<Built>>,
}

impl Built {
    /// Returns whether the layer is a block or contains one.
    pub(crate) fn has_block(&self) -> bool {
        let inner = || self.children.iter().chain(&self.shortcut).any(|layer| layer.has_block());
        matches!(self.kind, Layer::Block { .. }) || inner()
    }

    /// Returns an inner layer, which `build` has made.
    pub(super) fn child(&self, name: &str) -> &Rc<Self> {
        let child = self.children.iter().find(|child| child.name == name);
        child.expect("`build` makes all inner layers that `forward` names")
    }

    /// Returns the parameter at this index, as the forward pass reads it.
    pub(super) fn parameter(&self, eager: &Eager, number: usize) -> Tensor {
        let id: ParameterId = self.parameters[number];
        eager.parameter(id)
    }

    /// Returns the output for an input.
    pub(crate) fn forward(self: &Rc<Self>, eager: &Eager, input: &Tensor) -> Result<Tensor> {
        eager.memory.in_layer(&self.name, || match self.group {
            Some(group) => eager.in_group(group, input, |input| self.output(eager, input)),
            None => self.output(eager, input),
        })
    }

    fn output(self: &Rc<Self>, eager: &Eager, input: &Tensor) -> Result<Tensor> {
        if eager.checkpoints_blocks() && matches!(self.kind, Layer::Block { .. }) {
            let layer = Rc::clone(self);
            return eager.checkpoint(input, move |eager, input| layer.output_once(eager, input));
        }
        self.output_once(eager, input)
    }

    fn output_once(self: &Rc<Self>, eager: &Eager, input: &Tensor) -> Result<Tensor> {
        match &self.kind {
            Layer::Sequential { .. } | Layer::Block { .. } => run_all(&self.children, eager, input),
            Layer::Branches { .. } | Layer::Product { .. } => {
                let is_sum = matches!(self.kind, Layer::Branches { .. });
                let mut outputs = self.children.iter().map(|branch| branch.forward(eager, input));
                let first = outputs.next().ok_or_else(|| eager.invalid("there are no branches"))??;
                outputs.try_fold(first, |result, output| {
                    if is_sum { eager.add(&result, &output?) } else { eager.multiply(&result, &output?) }
                })
            }
            Layer::Idle { .. } => Ok(input.clone()),
            Layer::Residual { in_place, .. } => {
                let output = run_all(&self.children, eager, input)?;
                let shortcut = run_all(&self.shortcut, eager, input)?;
                if *in_place { eager.add_in_place(&output, &shortcut) } else { eager.add(&shortcut, &output) }
            }
            Layer::EncoderDecoder { .. } => self.run_both(eager, input),
            Layer::Conv(conv) => {
                let bias = (self.parameters.len() > 1).then(|| self.parameter(eager, 1));
                eager.convolution(input, &self.parameter(eager, 0), bias.as_ref(), conv)
            }
            Layer::Linear(linear) => self.linear(linear, eager, input),
            Layer::Embedding { .. } | Layer::TiedEmbedding { .. } => eager.embedding(input, &self.parameter(eager, 0)),
            Layer::Embeddings(embeddings) => self.embeddings(embeddings, eager, input),
            Layer::PatchEmbedding { size, .. } => self.patches(eager, input, *size),
            Layer::FirstToken => {
                ensure(input.shape.rank() == 3, || eager.mismatch("(…, …, …)", input))?;
                let first = eager.narrow(input, 1, 1);
                let (batch, size) = (input.shape[0], input.shape[2]);
                Ok(eager.view(&first, Shape::from([batch, size])))
            }
            Layer::BatchNorm { .. } => eager.batch_norm(input, &self.parameter(eager, 0), &self.parameter(eager, 1)),
            Layer::LayerNorm { .. } => eager.layer_norm(input, &self.parameter(eager, 0), &self.parameter(eager, 1)),
            Layer::RmsNorm { .. } => eager.rms_norm_written_out(input, &self.parameter(eager, 0)),
            Layer::GemmaNorm { .. } => eager.gemma_norm(input, &self.parameter(eager, 0)),
            Layer::ChannelScale { .. } => eager.multiply(&self.parameter(eager, 0), input),
            Layer::Activation { function, in_place } => activate(eager, *function, *in_place, input),
            Layer::Dropout { probability } => eager.dropout(input, *probability),
            Layer::MaxPool(pool) => eager.max_pool(input, pool),
            Layer::AdaptiveAveragePool { size } => eager.adaptive_average_pool(input, size),
            Layer::Flatten => {
                let rows = input.shape.sizes().first().copied().unwrap_or(1);
                let rest = Shape::from(input.shape.sizes().get(1..).unwrap_or_default().to_vec());
                let rest = rest.elements().ok_or_else(|| eager.too_large())?;
                eager.reshape(input, &Shape::from([rows, rest]))
            }
            Layer::ChannelsToLast | Layer::ChannelsToFirst => match (input.shape.rank(), &self.kind) {
                (3, _) => Ok(eager.transpose(input, 1, 2)),
                (4, Layer::ChannelsToLast) => Ok(eager.transpose(&eager.transpose(input, 1, 2), 2, 3)),
                (4, _) => Ok(eager.transpose(&eager.transpose(input, 2, 3), 1, 2)),
                _ => Err(eager.mismatch("(…, …, …, …)", input)),
            },
            Layer::Scale => eager.multiply_by_number(input),
            Layer::ToF32 => eager.to(input, Dtype::F32),
            Layer::Attention(attention) => attention.forward(self, eager, input),
            Layer::Gate { function } => {
                let half = input.shape.last() / 2;
                let [gate, up] = eager.split_last(input, [half; 2])?;
                eager.multiply(&up, &activate(eager, *function, false, &gate)?)
            }
            Layer::Experts(experts) => experts.forward(self, eager, input),
            Layer::Positions { .. } => self.positions(eager, input),
            Layer::Leave { slot } => {
                eager.slots.borrow_mut().entry(slot.clone()).or_default().push(input.clone());
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
                eager.leave(slot, output);
                Ok(input.clone())
            }
            Layer::Release { slot } => {
                eager.slots.borrow_mut().remove(slot);
                Ok(input.clone())
            }
            Layer::Similarity { slot } => {
                let others = eager.unit_vectors(&eager.left(slot)?)?;
                let vectors = eager.unit_vectors(input)?;
                let products = eager.matmul(&vectors, &eager.transpose(&others, 0, 1))?;
                eager.multiply(&products, &self.parameter(eager, 0))
            }
        }
    }

    fn linear(&self, linear: &Linear, eager: &Eager, input: &Tensor) -> Result<Tensor> {
        let bias = (!linear.no_bias).then(|| eager.parameter(self.parameters[1]));
        let output = match &self.adapted.in_4_bits {
            Some(weight) => eager.linear_in_4_bits(input, weight, bias.as_ref())?,
            None => eager.linear(input, &eager.parameter(self.parameters[0]), bias.as_ref())?,
        };
        eager.adapted(&self.adapted, input, output)
    }

    fn positions(&self, eager: &Eager, input: &Tensor) -> Result<Tensor> {
        let table = self.parameter(eager, 0);
        let tokens = if input.shape.rank() == 3 { input.shape[1] } else { 0 };
        let (rows, size) = (table.shape[0], table.shape[1]);
        let fits = input.shape.last() == size && (1..=rows).contains(&tokens);
        ensure(fits, || eager.mismatch(format!("(…, {rows} or less, {size})"), input))?;
        let rows = eager.embedding(&eager.integers(&Shape::from([tokens]))?, &table)?;
        eager.add(input, &rows)
    }

    fn embeddings(&self, embeddings: &Embeddings, eager: &Eager, input: &Tensor) -> Result<Tensor> {
        let [tokens, positions, segments] = embeddings.table_names();
        let mut sum = self.child(tokens).forward(eager, input)?;
        for name in [segments, positions] {
            let Some(table) = self.children.iter().find(|child| child.name == name) else { continue };
            let (length, rows) = (input.shape.last(), embeddings.positions);
            let fits = name != positions || length <= rows;
            ensure(fits, || eager.error(Kind::TooLong { positions: rows, length }))?;
            // All sequences have the same positions, but in `generate` each sequence has its own.
            let is_generating = eager.step.decode.is_some();
            let is_one = name == positions && !is_generating;
            let shape = if is_one { Shape::from([1, input.shape.last()]) } else { input.shape.clone() };
            let rows = table.forward(eager, &eager.integers(&shape)?)?;
            if is_generating {
                // `position_embeds` of GPT-2. The tensor is kept until the model's output exists, because this variable refers to it.
                eager.leave("position_embeds", rows.clone());
            }
            sum = eager.add(&sum, &rows)?;
        }
        Ok(sum)
    }

    fn patches(&self, eager: &Eager, input: &Tensor, size: u64) -> Result<Tensor> {
        let [convolution, ..] = &self.children[..] else { return Ok(input.clone()) };
        let patches = convolution.forward(eager, input)?;
        let count = patches.shape[2].checked_mul(patches.shape[3]).ok_or_else(|| eager.too_large())?;
        let batch = input.shape[0];
        let tokens = eager.transpose(&eager.reshape(&patches, &Shape::from([batch, size, count]))?, 1, 2);
        drop(patches);
        let class = eager.expand(&self.parameter(eager, 0), 0, batch);
        let all = eager.concatenate(&[&class, &tokens], 1)?;
        drop((class, tokens));
        match self.children.get(1) {
            // In CLIP, positions are the rows of a table.
            Some(table) => {
                let rows = table.forward(eager, &eager.integers(&Shape::from([1, all.shape[1]]))?)?;
                eager.add(&all, &rows)
            }
            None => eager.add(&all, &self.parameter(eager, 1)),
        }
    }
}

pub(super) fn activate(eager: &Eager, function: Function, in_place: bool, input: &Tensor) -> Result<Tensor> {
    match function {
        Function::Relu | Function::Relu6 if in_place => eager.overwritten(input, function == Function::Relu6),
        Function::Relu | Function::Tanh => eager.unary(input, Saves::Output, 0),
        // `relu6` calls `hardtanh`.
        Function::Relu6 | Function::Gelu | Function::Silu => eager.unary(input, Saves::Input, 0),
        Function::GeluWrittenOut => eager.gelu_written_out(input),
        Function::QuickGelu => {
            let gate = eager.sigmoid(&eager.multiply_by_number(input)?)?;
            eager.multiply(input, &gate)
        }
    }
}
