//! A step of inference or training, as events.

use std::rc::Rc;

use crate::{
    allocator::AllocatorKind,
    class::Class,
    dtype::Dtype,
    eager::{Eager, Optimizer, Tensor},
    error::Error,
    estimate::{Estimate, PhasePeak},
    layer::{Built, build, run_all},
    memory::Memory,
    model::{Loss, Model},
    shape::Shape,
};

/// How a step is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// How many inputs are read at once.
    pub batch: u64,
    /// `None`: inference. Else a forward pass, a backward pass and an update by this optimizer.
    pub optimizer: Option<Optimizer>,
    /// The type of the parameters.
    pub parameters: Dtype,
    /// Autocast to this type.
    pub autocast: Option<Dtype>,
    /// Blocks of layers are recomputed in the backward pass.
    pub checkpointing: bool,
    /// The allocator.
    pub allocator: AllocatorKind,
    /// The workspace that cuBLAS takes through the allocator: once for the forward pass and once for the backward pass. PyTorch
    /// gives it 32 MiB on cards of compute capability 9.0, and 8.125 MiB on others.
    pub cublas_workspace: u64,
}

impl Default for Step {
    fn default() -> Self {
        Self {
            batch: 1,
            optimizer: None,
            parameters: Dtype::F32,
            autocast: None,
            checkpointing: false,
            allocator: AllocatorKind::PyTorch,
            cublas_workspace: 32 << 20,
        }
    }
}

/// The optimizer's state exists from the first update on, so the second step may need more than the first.
const STEPS: usize = 2;

impl Step {
    /// Inference with a batch.
    pub fn inference(batch: u64) -> Self {
        Self { batch, ..Self::default() }
    }

    /// A training step with a batch.
    pub fn training(batch: u64, optimizer: Optimizer) -> Self {
        Self { batch, optimizer: Some(optimizer), ..Self::default() }
    }

    /// Runs the step with a model, without values.
    pub fn estimate(&self, model: &Model) -> Result<Estimate, Error> {
        let memory = Rc::new(Memory::new(self.allocator));
        let eager = Eager::new(Rc::clone(&memory), self.cublas_workspace);
        eager.training.set(self.optimizer.is_some());
        eager.recomputes_blocks.set(self.checkpointing);
        memory.open("model");
        let layers = build(&eager, &model.layers, self.parameters)?;
        memory.close();
        let (parameters, parameter_bytes) = eager.count_parameters();
        memory.open("input");
        let (shape, dtype) = model.input(self.batch);
        let input = eager.empty(&shape, dtype, Class::Inputs)?;
        let labels = self.labels(&eager, model, &shape)?;
        memory.close();
        let mut phases = Vec::new();
        let mut states = Vec::new();
        for _ in 0..STEPS {
            self.run(&eager, model, (&layers, &input, labels.as_ref()), &mut states, &mut phases)?;
        }
        let (peak, parts) = memory.peak();
        Ok(Estimate::new(parameters, parameter_bytes, peak, parts, memory.reserved_peak(), phases))
    }

    fn labels(&self, eager: &Eager, model: &Model, shape: &Shape) -> Result<Option<Tensor>, Error> {
        if self.optimizer.is_none() {
            return Ok(None);
        }
        let shape = match model.loss {
            Loss::CrossEntropy => &Shape::from([self.batch]),
            Loss::NextToken | Loss::Token => shape,
        };
        // A language model's labels are its tokens; they are one tensor.
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
        states: &mut Vec<Tensor>,
        phases: &mut Vec<PhasePeak>,
    ) -> Result<(), Error> {
        let mut done = |name, peak| phases.push(PhasePeak { name, peak: peak_bytes(peak) });
        eager.begin_graph();
        eager.free_gradients();
        eager.memory.open("forward");
        let output = eager.with_grad(self.optimizer.is_some(), || {
            eager.with_autocast(self.autocast, || {
                let output = run_all(layers, eager, input)?;
                match labels {
                    None => Ok(output),
                    Some(labels) => loss(eager, model.loss, &output, labels),
                }
            })
        })?;
        done("forward", eager.memory.close());
        if let Some(optimizer) = self.optimizer {
            eager.memory.open("backward");
            eager.backward(&output)?;
            eager.memory.move_to(&[]);
            done("backward", eager.memory.close());
            eager.memory.open("update");
            eager.update(optimizer, states)?;
            done("update", eager.memory.close());
        }
        drop(output);
        eager.free_cache();
        Ok(())
    }
}

fn peak_bytes(bytes: u64) -> gpumem_core::model::Bytes {
    gpumem_core::model::Bytes::new(bytes)
}

fn loss(eager: &Eager, loss: Loss, output: &Tensor, labels: &Tensor) -> Result<Tensor, Error> {
    match loss {
        Loss::CrossEntropy | Loss::Token => eager.cross_entropy(output, labels),
        Loss::NextToken => {
            // The output of the model lives until the loss is there.
            let logits = eager.to(output, Dtype::F32)?;
            let labels = eager.shifted_labels(labels)?;
            eager.cross_entropy(&logits, &labels)
        }
    }
}
