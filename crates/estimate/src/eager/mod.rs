//! A model of PyTorch's eager mode. Operations make the same allocations as PyTorch's, in the same order, keep the same
//! tensors for the backward pass, and free a tensor with its last reference. Tensors have no values.

mod adapters;
mod autocast;
mod backward;
mod cache;
mod checkpoint;
mod ops;
mod optimizer;
mod parameters;
mod sharding;
mod tensor;
mod workspace;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, HashMap},
    rc::Rc,
};

use gpumem_core::model::CallsiteId;

pub use self::ops::{Conv, Window};
pub(crate) use self::{
    adapters::Adapted,
    checkpoint::Saved,
    ops::{Like, Saves},
    optimizer::OptimizerState,
    parameters::Role,
    sharding::ROOT,
    tensor::{Edge, Tensor, channels_last_strides},
    workspace::Convolution,
};
use crate::{Checkpointing, Class, Dtype, Error, Kind, Result, Shape, Step, StepMemory, memory::Storage};

/// The key of a shared tensor: its use and a number, its shape and its type.
type SharedKey = (&'static str, u64, Shape, Dtype);

type Slots = HashMap<String, Vec<Tensor>>;

/// The engine that runs operations. Contains all data of a model except its layers.
pub(crate) struct Eager {
    pub(crate) memory: Rc<StepMemory>,
    /// True if operations are recorded for the backward pass.
    grad_enabled: Cell<bool>,
    pub(crate) step: Step,
    /// True while the backward pass runs. It runs on its own thread, and therefore with its own handles of NVIDIA's
    /// libraries.
    in_backward: Cell<bool>,
    tape: Tape,
    parameters: RefCell<Vec<Parameter>>,
    autocast: Autocast,
    /// The checkpointed block that is running. `None` if there is none.
    checkpointing: RefCell<Option<BlockRun>>,
    /// The kept tokens of each attention layer, in the order of the forward pass.
    pub(crate) cache: RefCell<Vec<KeptTokens>>,
    /// The index of the next layer that keeps tokens.
    next_kept: Cell<usize>,
    /// The paths of all linear layers that were built, if the step has adapters or weights in 4 bits.
    linear: RefCell<Vec<String>>,
    sharding: Sharding,
    /// Tensors that layers leave for later ones, by name. Of several with one name, the last one is read first. A checkpointed block
    /// keeps them as they were when the block first ran, as PyTorch keeps the arguments of the block.
    pub(crate) slots: RefCell<Slots>,
    /// The memory of the tensors that the running node saved.
    unpacked: RefCell<Vec<Rc<Storage>>>,
    /// Tensors that the model computes once and all its layers read, such as the angles of positions.
    shared: RefCell<Vec<(SharedKey, Tensor)>>,
    pub(crate) workspaces: Workspaces,
}

/// The nodes of one step, in the order of the forward pass.
#[derive(Default)]
struct Tape(RefCell<Vec<Node>>);

struct Node {
    function: Option<BackwardFunction>,
    /// The destinations of the gradients of the inputs.
    inputs: Vec<Option<NodeInput>>,
    outputs: usize,
    /// The parameter whose gradient this node accumulates.
    parameter: Option<usize>,
    /// The layer in the forward pass.
    layers: Rc<[CallsiteId]>,
}

/// An input of an operation, whose gradient is like the input.
struct NodeInput {
    edge: Edge,
    like: Like,
}

/// The gradients of the outputs of a node, or of its inputs. `None` for a missing one.
pub(crate) type Grads = Vec<Option<Tensor>>;

/// The function of a node, which computes the gradients of the inputs from those of the outputs. It owns the tensors
/// that the forward pass saved, which are freed after it has run.
type BackwardFunction = Box<dyn FnOnce(&Eager, &[Option<Tensor>]) -> Result<Grads>>;

#[derive(Debug)]
struct Parameter {
    tensor: Tensor,
    grad: Option<Tensor>,
    /// The node of this step that accumulates its gradients.
    edge: Option<Edge>,
    is_trainable: bool,
    is_buffer: bool,
    /// The number of elements, if one byte contains several.
    packed_elements: Option<u64>,
    /// The stored type, if it differs from the type of computation.
    stored: Option<Dtype>,
    /// The part that this rank has. `None` if it has the whole parameter.
    shard: Option<Shard>,
    /// The layer that the parameter belongs to.
    layers: Rc<[CallsiteId]>,
}

/// The id of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ParameterId(usize);

#[derive(Debug, Default)]
struct Autocast {
    dtype: Cell<Option<Dtype>>,
    /// Copies of parameters, which are kept until autocast ends.
    copies: RefCell<BTreeMap<usize, Tensor>>,
}

/// How a checkpointed block is running.
#[derive(Clone)]
enum BlockRun {
    /// The block runs for the first time. The tensors that it saves are counted but not kept.
    First(Rc<RecomputedBlock>),
    /// The block runs again. The tensors that it saves are kept.
    Again(Rc<RecomputedBlock>),
}

type RunBlock = Box<dyn Fn(&Eager) -> Result<()>>;

/// A block whose saved tensors are recomputed.
pub(crate) struct RecomputedBlock {
    run: RunBlock,
    /// The layer that the block is in.
    layers: Rc<[CallsiteId]>,
    state: RefCell<RecomputedState>,
}

#[derive(Debug, Default)]
struct RecomputedState {
    /// The number of tensors that the first run saved.
    saved: usize,
    /// The tensors that the second run saved and that the backward pass has not used yet.
    again: Vec<Option<Tensor>>,
}

#[derive(Debug, Default)]
pub(crate) struct KeptTokens {
    /// The keys and the values.
    kept: Option<[Tensor; 2]>,
    /// How many tokens it contains, if it has a fixed room for them.
    tokens: u64,
}

#[derive(Debug, Default)]
struct Sharding {
    /// Groups of parameters that are gathered together (`FSDPParamGroup`).
    groups: RefCell<Vec<ParameterGroup>>,
    /// The group of the parameters that are currently being built.
    building: Cell<usize>,
    /// The order of groups in the forward pass (`post_forward_order`).
    order: RefCell<Vec<usize>>,
    /// The buffer of the last group of the forward pass (`all_gather_state`).
    gathered: RefCell<Option<Tensor>>,
    /// Gradients that are being added up (`reduce_scatter_state`).
    reduced: RefCell<Option<Tensor>>,
    /// The buckets of `DistributedDataParallel`.
    buckets: RefCell<Vec<Tensor>>,
}

#[derive(Debug, Default)]
struct ParameterGroup {
    /// The indexes of its parameters.
    parameters: Vec<usize>,
    /// The gathered parameters that have not been copied out yet (`_all_gather_result`).
    pending: Option<Tensor>,
    is_gathered: bool,
    /// True if its gradients have been added up in this backward pass.
    is_reduced: bool,
}

/// The part of a parameter that belongs to a rank.
#[derive(Debug)]
struct Shard {
    /// The shard, padded so that all shards have the same size (`_sharded_param_data`).
    tensor: Tensor,
    gradient: Option<Tensor>,
    /// The bytes of the whole parameter when it is gathered.
    whole_bytes: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Workspaces {
    /// One workspace for each thread: the first one runs the forward pass, the second one the backward pass.
    cublas: RefCell<[Option<Tensor>; 2]>,
    cublaslt: RefCell<[Option<Tensor>; 2]>,
    /// The largest workspace of a convolution.
    pub(crate) largest: Cell<u64>,
    /// True if each convolution takes cuDNN's largest workspace, and not none.
    convolutions_take_most: bool,
}

impl Eager {
    pub(crate) fn new(memory: Rc<StepMemory>, step: Step, convolutions_take_most: bool) -> Self {
        Self {
            memory,
            grad_enabled: Cell::new(false),
            step,
            in_backward: Cell::new(false),
            tape: Tape::default(),
            parameters: RefCell::default(),
            autocast: Autocast::default(),
            checkpointing: RefCell::default(),
            cache: RefCell::default(),
            next_kept: Cell::default(),
            linear: RefCell::default(),
            sharding: Sharding { groups: RefCell::new(vec![ParameterGroup::default()]), ..Sharding::default() },
            slots: RefCell::default(),
            unpacked: RefCell::default(),
            shared: RefCell::default(),
            workspaces: Workspaces { convolutions_take_most, ..Workspaces::default() },
        }
    }

    /// Returns whether dropout and batch norm are in training mode.
    pub(crate) fn is_training(&self) -> bool {
        self.step.optimizer.is_some()
    }

    pub(crate) fn checkpoints_blocks(&self) -> bool {
        self.step.checkpointing == Checkpointing::Blocks
    }

    /// Calls `run` with or without recording for the backward pass.
    pub(crate) fn with_grad<R>(&self, enabled: bool, run: impl FnOnce() -> R) -> R {
        let before = self.grad_enabled.replace(enabled);
        let result = run();
        self.grad_enabled.set(before);
        result
    }

    /// Returns a tensor that all layers with the same key share until the model has computed its output.
    pub(crate) fn shared(&self, key: (&'static str, u64), shape: &Shape, dtype: Dtype) -> Result<Tensor> {
        let key = (key.0, key.1, shape.clone(), dtype);
        if let Some((_, tensor)) = self.shared.borrow().iter().find(|(known, _)| *known == key) {
            return Ok(tensor.clone());
        }
        let tensor = self.output(shape, dtype)?;
        self.shared.borrow_mut().push((key, tensor.clone()));
        Ok(tensor)
    }

    /// Drops the shared tensors when the model has computed its output. Blocks that run again keep the tensors that
    /// they read.
    pub(crate) fn free_shared(&self) {
        if !self.checkpoints_blocks() {
            drop(self.shared.take());
        }
    }

    /// Leaves a tensor for later layers, instead of others with the same name. `target` are the tokens that the decoder reads.
    pub(crate) fn leave(&self, slot: &str, tensor: Tensor) {
        self.slots.borrow_mut().insert(slot.to_owned(), vec![tensor]);
    }

    /// Returns the last tensor that was left with this name. `encoder` is the output of an encoder.
    pub(crate) fn left(&self, slot: &str) -> Result<Tensor> {
        let tensor = self.slots.borrow().get(slot).and_then(|tensors| tensors.last().cloned());
        tensor.ok_or_else(|| self.invalid(format!("no layer before it leaves `{slot}`")))
    }

    pub(crate) fn error(&self, kind: Kind) -> Error {
        Error::in_layer(self.memory.path(), kind)
    }

    pub(crate) fn invalid(&self, what: impl Into<String>) -> Error {
        self.error(Kind::Invalid(what.into()))
    }

    pub(crate) fn too_large(&self) -> Error {
        self.error(Kind::TooLarge)
    }

    /// Returns the error for a layer that needs an input of another shape.
    pub(crate) fn mismatch(&self, expected: impl std::fmt::Display, found: &Tensor) -> Error {
        self.invalid(format!("expects an input of shape {expected} and gets {}", found.shape))
    }

    /// Returns the error for two tensors that do not fit together.
    pub(crate) fn pair(&self, operation: &str, first: &Shape, second: &Shape) -> Error {
        self.invalid(format!("{operation} does not work with the shapes {first} and {second}"))
    }

    /// Allocates a tensor.
    pub(crate) fn empty(&self, shape: &Shape, dtype: Dtype, class: Class) -> Result<Tensor> {
        let bytes = shape.elements().and_then(|elements| dtype.bytes(elements));
        let storage = Storage::new(&self.memory);
        storage.fill(bytes.ok_or_else(|| self.too_large())?, class)?;
        Ok(Tensor::new(Rc::new(storage), shape.clone(), dtype))
    }

    /// Allocates a tensor for a result.
    pub(crate) fn output(&self, shape: &Shape, dtype: Dtype) -> Result<Tensor> {
        self.empty(shape, dtype, Class::Activations)
    }

    /// Returns whether the operation has to be recorded for the backward pass.
    pub(crate) fn needs_grad(&self, inputs: &[&Tensor]) -> bool {
        self.grad_enabled.get() && inputs.iter().any(|input| input.edge.is_some())
    }
}
