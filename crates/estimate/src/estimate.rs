//! The result of an estimate.

use std::collections::BTreeMap;

use serde::{Serialize, Serializer};

use crate::{Bytes, Class};

/// The predicted memory of a step. `Display` is a report of at most 80 columns. Serialized amounts are in bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Estimate {
    /// The number of elements of all parameters. Tied weights are counted once.
    pub parameters: u64,
    /// The bytes of all parameters.
    pub parameter_bytes: Bytes,
    /// The highest sum of allocated bytes, as `torch.cuda.max_memory_allocated()` returns it.
    pub peak: Bytes,
    /// The parts of the peak, the largest first. They add up to the peak.
    #[serde(flatten, serialize_with = "with_classes")]
    pub parts: Vec<PeakPart>,
    /// The most memory that the allocator held from the driver, as `torch.cuda.max_memory_reserved()` returns it.
    pub reserved: Bytes,
    /// The phases of both steps, in order, each with its highest sum of allocated bytes.
    pub phases: Vec<PhasePeak>,
    /// The parts of the class `optimizer` at the peak. `None` if there are none.
    pub optimizer: Option<OptimizerParts>,
    /// The additional workspaces of cuDNN for convolutions, which are a range. `None` if cuDNN computes no convolution
    /// of the model.
    pub convolutions: Option<ConvolutionWorkspace>,
}

/// The workspaces of convolutions. `Estimate.peak` does not include them, because an algorithm without a workspace is
/// always available.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ConvolutionWorkspace {
    /// The largest workspace of one convolution.
    pub high: Bytes,
    /// The peak of the step if each convolution takes the largest workspace.
    pub peak: Bytes,
    /// The allocator's memory from the driver in that case.
    pub reserved: Bytes,
}

/// The memory of an optimizer at the peak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct OptimizerParts {
    /// The copies of the parameters in `f32`.
    pub copies: Bytes,
    /// The state that the optimizer keeps from one update to the next.
    pub state: Bytes,
    /// The memory that the optimizer uses only during an update, such as Adam's square roots of all parameters.
    pub temporary: Bytes,
}

/// A part of a peak.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PeakPart {
    /// The phase that allocated it: `model`, `input`, `forward`, `backward`, `update`, `prefill` or `decode`.
    pub phase: String,
    /// The path of the layer, such as `features.0`; empty outside of all layers.
    pub layer: String,
    /// The class of the memory.
    pub class: Class,
    /// Its bytes.
    pub bytes: Bytes,
}

/// A phase of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct PhasePeak {
    /// `forward`, `backward` or `update`; `prefill` or `decode` where tokens are generated.
    pub name: &'static str,
    /// The highest sum of allocated bytes during the phase.
    pub peak: Bytes,
}

impl OptimizerParts {
    /// Returns the sum.
    pub fn bytes(&self) -> Bytes {
        self.copies + self.state + self.temporary
    }
}

impl Estimate {
    /// Splits the memory of an optimizer, whose state has this size, into its parts.
    pub(crate) fn with_optimizer(self, state: u64) -> Self {
        let of = |phase: &str| {
            let parts = self.parts.iter().filter(|part| part.class == Class::Optimizer && part.phase == phase);
            parts.map(|part| part.bytes).sum::<Bytes>()
        };
        let (copies, in_update) = (of("model"), of("update"));
        // The state exists from the first update on, and no peak comes before it.
        let state = Bytes::new(state).min(in_update);
        let temporary = in_update.checked_sub(state).unwrap_or_default();
        let has_any = copies + in_update > Bytes::ZERO;
        Self { optimizer: has_any.then_some(OptimizerParts { copies, state, temporary }), ..self }
    }

    /// Returns the peak by class.
    pub fn classes(&self) -> Vec<(Class, Bytes)> {
        sums(&self.parts).into_iter().collect()
    }
}

/// The memory that the driver counts for a process outside the allocator: the CUDA context, loaded kernels, and the
/// blocks of NVIDIA's libraries. This is a range, because kernels are loaded when they are first needed.
///
/// No [`Estimate`] includes it: `torch.cuda.max_memory_allocated()` does not count it. `nvidia-smi` shows it together with
/// [`Estimate::reserved`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ContextSize {
    /// The memory of a context without any kernels.
    pub low: Bytes,
    /// The memory after training steps with cuBLAS and cuDNN.
    pub high: Bytes,
}

impl ContextSize {
    /// Returns the range that was measured on GPUs of a compute capability, such as `(9, 0)` for H100 and H200. `None`
    /// if there is no measurement. The values are those of PyTorch 2.11 with CUDA 13.0 (`measure/context.py`). Other
    /// builds have other kernels.
    pub const fn measured(capability: (u32, u32)) -> Option<Self> {
        match capability {
            (9, 0) => Some(Self { low: Bytes::new(552_402_944), high: Bytes::new(806_158_336) }),
            _ => None,
        }
    }
}

fn sums(parts: &[PeakPart]) -> BTreeMap<Class, Bytes> {
    let mut sums: BTreeMap<Class, Bytes> = BTreeMap::new();
    for part in parts {
        let sum = sums.entry(part.class).or_default();
        *sum = *sum + part.bytes;
    }
    sums
}

/// Writes the parts, and the peak by class.
fn with_classes<S: Serializer>(parts: &[PeakPart], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map([("classes", serde_json::json!(sums(parts))), ("parts", serde_json::json!(parts))])
}
