//! A step of inference or training, as events.

use std::{path::Path, rc::Rc};

use serde_json::{Map, Value, json};

use crate::{
    Bytes, Checkpointing, Class, ConvolutionWorkspace, DataParallelKind, Decode, Dtype, Eager, Error, Estimate, Loss,
    Model, Optimizer, PhasePeak, Result, Shape, Step, StepMemory, Tensor, Types,
    eager::{OptimizerState, ROOT},
    ensure, files,
    layer::{Built, build, run_all, run_model},
};

/// The number of steps that are run. The optimizer's state exists from the first update on, so the second step may need
/// more than the first.
const STEPS: usize = 2;

/// The maximum size of a step's file. A step has few fields, but may contain a list of layer names, which are compared
/// with all layers.
const LONGEST_STEP: u64 = 1 << 16;

/// The maximum number of passes that are run. The first pass creates the gradients, and the second one adds to them. All
/// later ones allocate the same as the second. A few more let the allocator settle.
const MICRO_BATCHES: u64 = 4;

/// The maximum number of tokens that can be generated. Each token is a pass through the model.
const MOST_TOKENS: u64 = 32_768;

impl Step {
    /// Reads a step from a JSON file of at most 64 KiB. Missing fields have their defaults, and unknown fields are
    /// errors.
    ///
    /// # Errors
    /// Returns an error if the file cannot be read, is too long, or is not a step. The error names the file and the field.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let text = files::text(path.as_ref(), LONGEST_STEP)?;
        let error = |why: String| files::file_error(path.as_ref(), why);
        // Serde also takes a list for the fields, in their order.
        let fields: Map<String, Value> = serde_json::from_str(&text).map_err(|why| error(why.to_string()))?;
        serde_json::from_str(&text).map_err(|why| {
            // All fields are optional, so each can be read alone, to find the one that is wrong.
            let of_field = |(name, value): (&String, &Value)| {
                let why = serde_json::from_value::<Self>(json!({name: value})).err()?.to_string();
                let name = format!("`{name}`");
                Some(if why.contains(&name) { why } else { format!("{name}: {why}") })
            };
            error(fields.iter().find_map(of_field).unwrap_or_else(|| why.to_string()))
        })
    }

    /// Runs the step with a model, without values.
    ///
    /// # Errors
    /// Returns an error if the step cannot run with the model, or if it needs more memory than its limit. The error names the layer.
    pub fn estimate(&self, model: &Model) -> Result<Estimate> {
        self.estimate_in(&self.memory(true), model)
    }

    /// Returns the peak of [`estimate`](Self::estimate), without its parts, and the number of events in the step, which determines how
    /// long it takes to find the peak.
    pub(crate) fn peak(&self, model: &Model) -> Result<(u64, u64)> {
        let memory = self.memory(false);
        let (estimate, _) = self.run_in(&memory, false, model)?;
        Ok((estimate.peak.get(), memory.events()))
    }

    fn estimate_in(&self, memory: &Rc<StepMemory>, model: &Model) -> Result<Estimate> {
        let (mut estimate, largest_workspace) = self.run_in(memory, false, model)?;
        if largest_workspace > 0 {
            let (peak, reserved) = match self.run_in(&self.memory(false), true, model) {
                Ok((with, _)) => (with.peak, with.reserved),
                // If a workspace does not fit, PyTorch chooses another algorithm, so the result is the limit.
                Err(error) => {
                    let limit = self.limit.filter(|_| error.is_out_of_memory()).ok_or(error)?;
                    (limit, limit)
                }
            };
            // Blocks may be placed better with workspaces than without.
            let (peak, reserved) = (peak.max(estimate.peak), reserved.max(estimate.reserved));
            estimate.convolutions = Some(ConvolutionWorkspace { high: Bytes::new(largest_workspace), peak, reserved });
        }
        Ok(estimate)
    }

    /// Runs the step, and also returns its events as a recording: a file like the one that a program writes with
    /// `GPUMEM_CAPTURE`. Everything that reads recordings can read it. The layers are its scopes, and the classes
    /// replace the libraries of a program.
    ///
    /// # Errors
    /// Returns the errors of [`estimate`](Self::estimate).
    pub fn record(&self, model: &Model) -> Result<(Estimate, Vec<u8>)> {
        let memory = self.memory(true);
        memory.record(&model.name);
        let estimate = self.estimate_in(&memory, model)?;
        Ok((estimate, memory.finish_recording().unwrap_or_default()))
    }

    fn memory(&self, knows_parts: bool) -> Rc<StepMemory> {
        let limit = self.limit.map_or(u64::MAX, Bytes::get);
        Rc::new(StepMemory::new(self.allocator, limit, knows_parts))
    }

    /// Returns an estimate, and the largest workspace of a convolution.
    fn run_in(&self, memory: &Rc<StepMemory>, convolutions_take_most: bool, model: &Model) -> Result<(Estimate, u64)> {
        self.check()?;
        let eager = Eager::new(Rc::clone(memory), self.clone(), convolutions_take_most);
        memory.open("model");
        let types = Types::new(self.parameters, self.computes_in());
        let layers = build(&eager, &model.layers, types)?;
        eager.make_buckets()?;
        memory.close();
        eager.check_adapters()?;
        let fits = !eager.checkpoints_blocks() || layers.iter().any(|layer| layer.has_block());
        ensure(fits, || Error::invalid("the model has no blocks that checkpointing could run again"))?;
        let (parameters, parameter_bytes) = eager.count_parameters();
        memory.open("input");
        let (shape, dtype) = model.input(self.batch);
        let fits = shape.elements() != Some(0);
        ensure(fits, || Error::invalid(format!("the input has the shape {shape}, which has no elements")))?;
        // Without autocast, numbers have the type of the parameters.
        let is_converted = dtype.is_float() && types.others.is_float() && self.autocast.is_none();
        let dtype = if is_converted { types.others } else { dtype };
        let input = eager.empty(&shape, dtype, Class::Inputs)?;
        let target = model.target(self.batch);
        if let Some(target) = &target {
            eager.leave("target", eager.empty(target, Dtype::I64, Class::Inputs)?);
        }
        let labels = self.labels(&eager, model, target.as_ref().unwrap_or(&shape))?;
        memory.close();
        let mut phases = Vec::new();
        // The optimizer's state lives until the step is over, as the parameters do.
        let mut state = OptimizerState::default();
        if let Some(decode) = &self.decode {
            self.generate(decode, &eager, model, &layers, &input, &mut phases)?;
        } else {
            if self.master_weights {
                memory.open("model");
                eager.make_masters(&mut state)?;
                memory.close();
            }
            for _ in 0..STEPS {
                self.run(&eager, model, (&layers, &input, labels.as_ref()), &mut state, &mut phases)?;
            }
        }
        let (peak, parts) = memory.end();
        let (parameter_bytes, peak) = (Bytes::new(parameter_bytes), Bytes::new(peak));
        let reserved = Bytes::new(memory.reserved_peak());
        let (optimizer, convolutions) = (None, None);
        let estimate = Estimate { parameters, parameter_bytes, peak, parts, reserved, phases, optimizer, convolutions };
        Ok((estimate.with_optimizer(state.bytes()), eager.workspaces.largest.get()))
    }

    /// Returns an error if settings contradict each other or are not supported.
    fn check(&self) -> Result<()> {
        let is_training = self.optimizer.is_some();
        let kind = self.data_parallel.map(|parallel| parallel.kind);
        let gathered = self.data_parallel.and_then(|parallel| parallel.gathered);
        let has_shards = kind.is_some_and(DataParallelKind::has_shards);
        let wrong = if self.batch == 0 || self.micro_batches == 0 {
            "the batch and the number of passes (`micro_batches`) are 1 or more"
        } else if is_training && !is_wide(self.parameters) && self.parameters != Dtype::F64 {
            "parameters of this type have no gradients; training needs f16, bf16, f32 or f64"
        } else if !self.parameters.is_float() && !self.parameters.is_only_stored() {
            "parameters are numbers with a fraction, bytes (`i8`), or blocks of such numbers"
        } else if self.compute.is_some() && !self.parameters.is_only_stored() {
            "the type of the parameters is the one that is computed in; `compute` is for weights that are only stored in theirs"
        } else if self.compute.is_some_and(|dtype| !is_wide(dtype)) {
            "products are computed in f16, bf16 or f32"
        } else if self.parameters.is_only_stored() && self.quantized.is_some() {
            "`quantized` makes weights of 4 bits from parameters in f16, bf16 or f32"
        } else if self.parameters.is_only_stored() && self.data_parallel.is_some() {
            "weights that are only stored in their type are not modelled with several ranks"
        } else if self.autocast.is_some_and(|dtype| !matches!(dtype, Dtype::F16 | Dtype::Bf16)) {
            "autocast is to f16 or bf16"
        } else if self.adapters.as_ref().is_some_and(|lora| !(0.0..1.0).contains(&lora.dropout)) {
            "the dropout of adapters is a probability below 1"
        } else if gathered.is_some_and(|dtype| !is_wide(dtype)) {
            "shards are gathered as f16, bf16 or f32"
        } else if self.decode.as_ref().is_some_and(|decode| decode.tokens > MOST_TOKENS) {
            "more than 32,768 tokens are too many to run one by one; a longer prompt and fewer tokens have the same cache"
        } else if !is_training && self.micro_batches > 1 {
            "gradients are added up over several passes in training only"
        } else if is_training && self.decode.is_some() {
            "tokens are decoded in inference only, without an optimizer"
        } else if !is_training && self.master_weights {
            "copies of the parameters in f32 are for the optimizer, which inference does not have"
        } else if self.master_weights && matches!(self.parameters, Dtype::F32 | Dtype::F64) {
            "copies of the parameters in f32 are for parameters of a smaller type"
        } else if self.adapters.as_ref().is_some_and(|lora| lora.rank == 0) {
            "adapters of rank 0 have no parameters"
        } else if self.adapters.as_ref().is_some_and(|lora| lora.targets.is_empty()) {
            "adapters need the names of layers that get one"
        } else if is_training && self.quantized.is_some() && self.adapters.is_none() {
            "weights in 4 bits have no gradients, so training needs adapters"
        } else if self.quantized.as_ref().is_some_and(|quantized| !is_wide(quantized.compute)) {
            "weights in 4 bits are multiplied as f16, bf16 or f32"
        } else if !is_training && self.checkpointing != Checkpointing::Off {
            "checkpointing needs a backward pass, which inference does not have"
        } else if self.data_parallel.is_some_and(|parallel| parallel.ranks < 2) {
            "data parallelism needs two ranks or more"
        } else if !is_training && kind.is_some_and(|kind| kind != DataParallelKind::Zero3) {
            "inference has no gradients and no optimizer to share out; only zero3 shares out parameters"
        } else if kind.is_some() && self.decode.is_some() {
            "decoding with zero3 would gather all parameters for each token"
        } else if !has_shards && gathered.is_some() {
            "only shards of parameters (zero2, zero3) are gathered"
        } else if has_shards && self.autocast.is_some() {
            "autocast keeps copies of all parameters, which shards are meant to avoid; gather them in the smaller type instead"
        } else if has_shards && self.master_weights {
            "shards of parameters in f32 that are gathered in a smaller type need no other copies in f32"
        } else if kind == Some(DataParallelKind::Zero1) && self.master_weights {
            "ZeroRedundancyOptimizer has no copies of parameters in f32"
        } else if has_shards && (self.adapters.is_some() || self.quantized.is_some()) {
            "adapters and weights in 4 bits are not modelled with shards of parameters"
        } else if has_shards && self.optimizer == Some(Optimizer::Adam8bit) {
            "bitsandbytes cannot update the shards of fully_shard, which are of the type DTensor"
        } else if has_shards && self.optimizer == Some(Optimizer::Adafactor) {
            "Adafactor adds up rows and columns of whole parameters, which is not modelled with shards of them"
        } else {
            return Ok(());
        };
        Err(Error::invalid(wrong))
    }

    fn labels(&self, eager: &Eager, model: &Model, shape: &Shape) -> Result<Option<Tensor>> {
        if self.optimizer.is_none() {
            return Ok(None);
        }
        let shape = match model.loss {
            // The target has the shape of the output, which is not known yet.
            Loss::MeanSquares => &Shape::from([0]),
            Loss::CrossEntropy => &Shape::from([self.batch]),
            Loss::NextToken | Loss::Token => shape,
        };
        // The labels of a language model are its input tokens, so they need no further bytes.
        let bytes = if model.loss == Loss::CrossEntropy { shape.clone() } else { Shape::from([0]) };
        let mut labels = eager.empty(&bytes, Dtype::I64, Class::Inputs)?;
        labels.shape = shape.clone();
        Ok(Some(labels))
    }

    fn run(
        &self,
        eager: &Eager,
        model: &Model,
        (layers, input, labels): (&[Rc<Built>], &Tensor, Option<&Tensor>),
        state: &mut OptimizerState,
        phases: &mut Vec<PhasePeak>,
    ) -> Result<()> {
        let mut done = |name, peak| phases.push(PhasePeak { name, peak: Bytes::new(peak) });
        eager.zero_grad(state);
        let mut output = None;
        for _ in 0..self.micro_batches.clamp(1, MICRO_BATCHES) {
            eager.start_graph();
            eager.start_pass();
            eager.memory.open("forward");
            let result = eager.with_grad(self.optimizer.is_some(), || {
                eager.with_autocast(self.autocast, || {
                    let result = eager.in_group(ROOT, input, |input| {
                        // In transformers, a variable holds the input of the head until the loss exists.
                        let has_head = model.loss != Loss::CrossEntropy;
                        let (hidden, output) = match layers.split_last().filter(|_| has_head) {
                            Some((head, body)) => {
                                let hidden = run_all(body, eager, input)?;
                                let output = run_model(std::slice::from_ref(head), eager, &hidden)?;
                                (Some(hidden), output)
                            }
                            None => (None, run_model(layers, eager, input)?),
                        };
                        let Some(labels) = labels else { return Ok(output) };
                        let loss = Self::loss(eager, model.loss, &output, labels)?;
                        drop((hidden, output));
                        Ok(loss)
                    })?;
                    // The loss is divided by the number of passes, so that gradients add up to those of the mean.
                    if self.micro_batches > 1 { eager.multiply_by_number(&result) } else { Ok(result) }
                })
            })?;
            done("forward", eager.memory.close());
            // A loss lives until the next one is assigned to its variable.
            let result = output.insert(result);
            if self.optimizer.is_some() {
                eager.memory.open("backward");
                eager.backward(result)?;
                eager.memory.move_to(&[]);
                eager.finish_backward()?;
                done("backward", eager.memory.close());
            }
        }
        if let Some(optimizer) = self.optimizer {
            eager.memory.open("update");
            eager.update(optimizer, state)?;
            done("update", eager.memory.close());
        }
        drop(output);
        eager.free_cache();
        Ok(())
    }

    fn loss(eager: &Eager, loss: Loss, output: &Tensor, labels: &Tensor) -> Result<Tensor> {
        match loss {
            Loss::CrossEntropy | Loss::Token => eager.cross_entropy(output, labels),
            Loss::MeanSquares => eager.mean_squares(output),
            Loss::NextToken => {
                // The output of the model lives until the loss exists.
                let logits = eager.to(output, Dtype::F32)?;
                let labels = eager.shifted_labels(labels)?;
                eager.cross_entropy(&logits, &labels)
            }
        }
    }

    /// Runs `generate` of transformers, without sampling.
    fn generate(
        &self,
        decode: &Decode,
        eager: &Eager,
        model: &Model,
        layers: &[Rc<Built>],
        prompt: &Tensor,
        phases: &mut Vec<PhasePeak>,
    ) -> Result<()> {
        let invalid = |what: &str| Err(Error::invalid(what));
        if decode.tokens == 0 {
            return invalid("decoding needs at least 1 token");
        }
        let (true, Some((head, body))) = (model.loss == Loss::NextToken, layers.split_last()) else {
            return invalid("only a model that predicts the next token can decode");
        };
        // The whole generation runs under one autocast, which therefore keeps its copies of parameters.
        eager.with_autocast(self.autocast, || {
            let mut ids = prompt.clone();
            let mut new = prompt.clone();
            for (name, count) in [("prefill", 1), ("decode", decode.tokens - 1)] {
                if count == 0 {
                    continue;
                }
                eager.memory.open(name);
                for _ in 0..count {
                    eager.start_pass();
                    new = next_token(eager, body, head, [&ids, &new])?;
                    ids = eager.concatenate(&[&ids, &new], 1)?;
                }
                phases.push(PhasePeak { name, peak: Bytes::new(eager.memory.close()) });
                if eager.cache.borrow().is_empty() {
                    return invalid("the model keeps no keys and values, so it cannot decode");
                }
            }
            Ok(())
        })?;
        eager.free_cache();
        Ok(())
    }
}

/// Returns the next token of each sequence, (batch, 1), computed from the logits of the last position
/// (`logits_to_keep=1`), a copy of them in `f32`, and the index of the largest.
fn next_token(eager: &Eager, body: &[Rc<Built>], head: &Rc<Built>, [all, tokens]: [&Tensor; 2]) -> Result<Tensor> {
    // `prepare_inputs_for_generation` makes a copy of the tokens, their positions, and the mask of all tokens so far.
    let tokens = &eager.integers(&tokens.shape)?;
    let _others = [eager.integers(&tokens.shape)?, eager.integers(&all.shape)?];
    let hidden = run_model(body, eager, tokens)?;
    ensure(hidden.shape.rank() == 3, || eager.mismatch("(…, …, …)", &hidden))?;
    let last = eager.narrow(&hidden, 1, 1);
    let logits = head.forward(eager, &last)?;
    let _scores = eager.output(&logits.shape, Dtype::F32)?;
    eager.integers(&Shape::from([tokens.shape[0], 1]))
}

/// Returns whether products can be computed in this type.
fn is_wide(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F16 | Dtype::Bf16 | Dtype::F32)
}
