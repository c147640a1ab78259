//! A model of PyTorch's eager mode: operations allocate what PyTorch's operations allocate, in the same order, keep for the backward
//! pass what PyTorch keeps, and free a tensor with its last reference. There are no values.

mod adapters;
mod autocast;
mod backward;
mod cache;
mod checkpoint;
mod context;
mod ops;
mod optimizer;
mod parameters;
mod segments;
mod sharding;
mod tensor;
mod vocabulary;
mod workspace;

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    fmt,
    rc::Rc,
};

use gpumem_core::model::CallsiteId;

pub use self::optimizer::Optimizer;
pub(crate) use self::{
    adapters::Adapted,
    checkpoint::Saved,
    context::Context,
    ops::{AttentionArguments, ConvArguments, PoolArguments},
    optimizer::OptimizerState,
    segments::Segments,
    sharding::ROOT,
    tensor::{Edge, Tensor, channels_last_strides, contiguous_strides},
    workspace::Convolution,
};
use crate::{
    class::Class,
    dtype::Dtype,
    error::{Error, Kind},
    memory::{Memory, Storage},
    settings::{DataParallel, KvCache, Lora, Quantized},
    shape::Shape,
};

/// What a shared tensor is for, with a number; its shape and type.
type SharedKey = (&'static str, u64, Shape, Dtype);

/// What runs operations, with all that one model has beside its layers.
#[derive(Debug)]
pub(crate) struct Eager {
    pub(crate) memory: Rc<Memory>,
    /// Operations record what the backward pass needs.
    grad_enabled: Cell<bool>,
    /// Dropout and batch norm are in training mode.
    pub(crate) training: Cell<bool>,
    /// The backward pass runs. It has a thread of its own, and so handles of its own of NVIDIA's libraries.
    in_backward: Cell<bool>,
    tape: Tape,
    parameters: RefCell<Vec<Parameter>>,
    autocast: Autocast,
    /// `None`: no checkpointed block runs.
    checkpointing: RefCell<Option<BlockRun>>,
    /// Which layers run again in the backward pass.
    segments: RefCell<Option<Rc<Segments>>>,
    cache: Cache,
    adapters: Adapters,
    sharding: Sharding,
    context: RefCell<Context>,
    /// The memory of what the node that runs has saved.
    unpacked: RefCell<Vec<Rc<Storage>>>,
    /// Tensors that the model makes once and all its layers read, such as the angles of positions.
    shared: RefCell<Vec<(SharedKey, Tensor)>>,
    workspaces: Workspaces,
}

/// The nodes of one step, in the order of the forward pass.
#[derive(Default)]
struct Tape(RefCell<Vec<Node>>);

struct Node {
    function: Option<BackwardFunction>,
    /// Where the gradients of the inputs go.
    inputs: Vec<Option<NodeInput>>,
    outputs: usize,
    /// The parameter whose gradient this node accumulates.
    parameter: Option<usize>,
    /// The layer of the forward pass.
    layers: Rc<[CallsiteId]>,
}

/// An input of an operation. Its gradient has the same shape and type.
struct NodeInput {
    edge: Edge,
    shape: Shape,
    dtype: Dtype,
    parameter: bool,
}

/// Gradients of the outputs of a node, or of its inputs. `None`: there is none.
pub(crate) type Grads = Vec<Option<Tensor>>;

/// What a node does: from the gradients of its outputs it makes those of its inputs. What the forward pass saved belongs to it
/// and is freed after it ran.
type BackwardFunction = Box<dyn FnOnce(&Eager, &[Option<Tensor>]) -> Result<Grads, Error>>;

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tape").field("nodes", &self.0.borrow().len()).finish()
    }
}

#[derive(Debug)]
struct Parameter {
    tensor: Tensor,
    grad: Option<Tensor>,
    /// The node of this step that accumulates its gradients.
    edge: Option<Edge>,
    is_trainable: bool,
    is_buffer: bool,
    /// How many elements it has, if several are in one byte.
    packed_elements: Option<u64>,
    /// What its bytes are, if it is computed with in another type.
    stored: Option<Dtype>,
    /// What this rank has of it. `None`: all.
    shard: Option<Shard>,
    /// The layer that it belongs to.
    layers: Rc<[CallsiteId]>,
}

/// The number of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ParameterId(usize);

#[derive(Debug, Default)]
struct Autocast {
    dtype: Cell<Option<Dtype>>,
    /// Copies of parameters, which live until autocast ends.
    copies: RefCell<BTreeMap<usize, Tensor>>,
}

/// How a checkpointed block runs.
#[derive(Clone, Debug)]
enum BlockRun {
    /// A block runs for the first time: what it saves is counted and not kept.
    First(Rc<RecomputedBlock>),
    /// A block runs again: what it saves is kept.
    Again(Rc<RecomputedBlock>),
}

type RunBlock = Box<dyn Fn(&Eager) -> Result<(), Error>>;

/// A block whose saved tensors are recomputed.
struct RecomputedBlock {
    run: RunBlock,
    /// The layer that the block is in.
    layers: Rc<[CallsiteId]>,
    state: RefCell<RecomputedState>,
}

#[derive(Debug, Default)]
struct RecomputedState {
    /// How many tensors the first run saved.
    saved: usize,
    /// What the second run saved and the backward pass has not used yet.
    again: Vec<Option<Tensor>>,
}

impl fmt::Debug for RecomputedBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RecomputedBlock").field("state", &self.state).finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Cache {
    kind: Cell<KvCache>,
    /// One pair for each attention layer, in the order of the forward pass.
    layers: RefCell<Vec<KeptTokens>>,
    /// The layer that is next.
    next: Cell<usize>,
    /// Tokens are generated.
    is_generating: Cell<bool>,
    /// What variables of the model refer to until its output is there.
    held: RefCell<Vec<Tensor>>,
}

#[derive(Debug)]
struct KeptTokens {
    keys: Option<Tensor>,
    values: Option<Tensor>,
    /// How many tokens it has.
    tokens: u64,
    /// Pages before the newest one.
    pages: Vec<Tensor>,
}

/// What changes the linear layers of a model.
#[derive(Debug, Default)]
struct Adapters {
    lora: RefCell<Option<Rc<Lora>>>,
    quantized: RefCell<Option<Rc<Quantized>>>,
    /// The paths of all linear layers that were built.
    linear: RefCell<Vec<String>>,
}

#[derive(Debug, Default)]
struct Sharding {
    parallel: Cell<Option<DataParallel>>,
    /// `FSDPParamGroup`: what is gathered together.
    groups: RefCell<Vec<ParameterGroup>>,
    /// The group of the parameters that are being built.
    building: Cell<usize>,
    /// `post_forward_order`.
    order: RefCell<Vec<usize>>,
    /// `all_gather_state`: what the last group of the forward pass was gathered in.
    gathered: RefCell<Option<Tensor>>,
    /// `reduce_scatter_state`: the gradients that are being added up.
    reduced: RefCell<Option<Tensor>>,
    /// The buckets of `DistributedDataParallel`.
    buckets: RefCell<Vec<Tensor>>,
}

#[derive(Debug, Default)]
struct ParameterGroup {
    /// The numbers of its parameters.
    parameters: Vec<usize>,
    /// `_all_gather_result`: it was requested, and not copied out yet.
    pending: Option<Tensor>,
    is_gathered: bool,
    /// Its gradients have been added up in this backward pass.
    is_reduced: bool,
}

/// What a rank has of a parameter.
#[derive(Debug)]
struct Shard {
    /// `_sharded_param_data`: with what is added so that all shards are of the same size.
    tensor: Tensor,
    gradient: Option<Tensor>,
    /// The bytes of the whole parameter, as it is gathered.
    whole_bytes: u64,
}

/// What the libraries take.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Libraries {
    /// The workspace of cuBLAS. 0: none has a workspace.
    pub(crate) cublas: u64,
    /// The multiprocessors of the card.
    pub(crate) multiprocessors: u64,
    /// Attention in 16 bits is `FlashAttention`'s instead of cuDNN's.
    pub(crate) prefers_flash_attention: bool,
    /// Each convolution takes the most that cuDNN may want, instead of nothing.
    pub(crate) convolutions_take_most: bool,
}

#[derive(Debug, Default)]
struct Workspaces {
    libraries: Libraries,
    /// One workspace for each thread: the first thread runs the forward pass, the second one the backward pass.
    cublas: RefCell<[Option<Tensor>; 2]>,
    cublaslt: RefCell<[Option<Tensor>; 2]>,
    /// The most that a convolution may take.
    largest: Cell<u64>,
}

impl Eager {
    pub(crate) fn new(memory: Rc<Memory>, libraries: Libraries) -> Self {
        Self {
            memory,
            grad_enabled: Cell::new(false),
            training: Cell::new(false),
            in_backward: Cell::new(false),
            tape: Tape::default(),
            parameters: RefCell::default(),
            autocast: Autocast::default(),
            checkpointing: RefCell::default(),
            segments: RefCell::default(),
            cache: Cache::default(),
            adapters: Adapters::default(),
            sharding: Sharding::default(),
            context: RefCell::default(),
            unpacked: RefCell::default(),
            shared: RefCell::default(),
            workspaces: Workspaces { libraries, ..Workspaces::default() },
        }
    }

    /// Runs with or without recording for the backward pass.
    pub(crate) fn with_grad<R>(&self, enabled: bool, run: impl FnOnce() -> R) -> R {
        let before = self.grad_enabled.replace(enabled);
        let result = run();
        self.grad_enabled.set(before);
        result
    }

    /// A tensor that all layers with the same key share until the model has made its output.
    pub(crate) fn shared(&self, key: (&'static str, u64), shape: &Shape, dtype: Dtype) -> Result<Tensor, Error> {
        let key = (key.0, key.1, shape.clone(), dtype);
        if let Some((_, tensor)) = self.shared.borrow().iter().find(|(known, _)| *known == key) {
            return Ok(tensor.clone());
        }
        let tensor = self.output(shape, dtype)?;
        self.shared.borrow_mut().push((key, tensor.clone()));
        Ok(tensor)
    }

    /// The model has made its output. Blocks that run again keep what they read.
    pub(crate) fn free_shared(&self, runs_again: bool) {
        if !runs_again {
            let freed = std::mem::take(&mut *self.shared.borrow_mut());
            drop(freed);
        }
    }

    /// Sets which layers run again in the backward pass.
    pub(crate) fn set_segments(&self, segments: Segments) {
        self.segments.replace(Some(Rc::new(segments)));
    }

    /// Checkpointing makes groups of the outermost layers.
    pub(crate) fn groups_whole_model(&self) -> bool {
        self.segments.borrow().as_ref().is_some_and(|segments| segments.groups_at(""))
    }

    /// Which layers run again in the backward pass; `None` if none do.
    pub(crate) fn segments(&self) -> Option<Rc<Segments>> {
        self.segments.borrow().clone()
    }

    pub(crate) fn error(&self, kind: Kind) -> Error {
        Error::in_layer(self.memory.path(), kind)
    }

    pub(crate) fn mismatch(&self, expected: impl Into<String>, found: &Tensor) -> Error {
        self.error(Kind::Mismatch { expected: expected.into(), found: found.shape.clone() })
    }

    /// A new tensor.
    pub(crate) fn empty(&self, shape: &Shape, dtype: Dtype, class: Class) -> Result<Tensor, Error> {
        let bytes = shape.elements().and_then(|elements| dtype.bytes(elements));
        let bytes = bytes.ok_or_else(|| self.error(Kind::TooLarge))?;
        let storage = Rc::new(self.memory.alloc(bytes, class)?);
        Ok(Tensor::new(storage, shape.clone(), dtype))
    }

    /// A new tensor for a result.
    pub(crate) fn output(&self, shape: &Shape, dtype: Dtype) -> Result<Tensor, Error> {
        self.empty(shape, dtype, Class::Activations)
    }

    /// The operation has to be recorded for the backward pass.
    pub(crate) fn needs_grad(&self, inputs: &[&Tensor]) -> bool {
        self.grad_enabled.get() && inputs.iter().any(|input| input.edge.is_some())
    }
}
