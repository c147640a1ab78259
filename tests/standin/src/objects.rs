//! The live objects other than blocks.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::thread::ThreadId;

use crate::cuda::CONTEXTS;
use crate::modules::Module;

/// The first handle of physical memory.
const PHYSICAL: usize = 0x4000_0000;

/// The objects by handle or address. A freed handle is handed out again, as by a real driver.
#[derive(Default)]
pub(crate) struct Objects {
    pub(crate) streams: HashMap<usize, Stream>,
    pub(crate) events: HashSet<usize>,
    /// The capture that each event was recorded in.
    pub(crate) recorded: HashMap<usize, Capture>,
    /// The nodes of each graph.
    pub(crate) graphs: HashMap<usize, Vec<Node>>,
    pub(crate) executables: HashMap<usize, Executable>,
    /// Blocks that graphs left live: the GPU, and the bytes.
    pub(crate) graph_blocks: BTreeMap<u64, (usize, u64)>,
    /// Imported memory, by its address here.
    pub(crate) imported: BTreeMap<u64, Imported>,
    /// The id of the latest block at each address. Later blocks have higher ids.
    pub(crate) numbers: HashMap<u64, u64>,
    pub(crate) numbered: u64,
    /// The contexts that the program created, without primary ones, and the GPU of each.
    pub(crate) contexts: HashMap<usize, usize>,
    /// The number of calls of `cuCtxAttach` for a context, minus the calls of `cuCtxDetach`.
    pub(crate) attached: HashMap<usize, u32>,
    /// The limits that the program set in each context.
    pub(crate) limits: HashMap<(usize, i32), u64>,
    pub(crate) modules: HashMap<usize, Module>,
    /// The id of each context, including primary ones.
    pub(crate) context_uids: HashMap<usize, u32>,
    /// The GPU of each created pool, and the pool's number on it.
    pub(crate) pools: HashMap<usize, (usize, u64)>,
    /// The current pool of each GPU, if it is not the default one.
    pub(crate) current_pools: HashMap<usize, usize>,
    pub(crate) arrays: HashMap<usize, Array>,
    pub(crate) physical: HashMap<usize, Physical>,
    /// Reserved addresses with their bytes, and the parts that are mapped: bytes, and the handle of the memory.
    pub(crate) ranges: BTreeMap<u64, u64>,
    pub(crate) mapped: BTreeMap<u64, (u64, usize)>,
    /// Managed blocks: bytes, and the context that they end with.
    pub(crate) managed: BTreeMap<u64, (u64, usize)>,
    /// The GPU that a managed block is on, if it is on one.
    pub(crate) resident: HashMap<u64, usize>,
    /// Pinned memory of the host.
    pub(crate) pinned: HashMap<usize, Vec<u8>>,
    pub(crate) registered: HashSet<usize>,
}

pub(crate) struct Stream {
    pub(crate) card: usize,
    pub(crate) context: usize,
    /// True if the stream and the legacy stream wait for each other.
    pub(crate) blocking: bool,
    pub(crate) capture: Option<Capture>,
}

/// The capture of a stream.
#[derive(Clone, Copy)]
pub(crate) struct Capture {
    pub(crate) graph: usize,
    /// A `CUstreamCaptureMode`.
    pub(crate) mode: i32,
    pub(crate) by: ThreadId,
    /// True if the capture started on this stream. False if the stream joined it.
    pub(crate) is_origin: bool,
    /// True if a call was made that is not allowed during a capture.
    pub(crate) broken: bool,
}

/// A node of a graph. A kernel has no effect here.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Node {
    Kernel,
    Alloc { card: usize, address: u64, bytes: u64 },
    Free(u64),
}

#[derive(Clone)]
pub(crate) struct Executable {
    pub(crate) graph: usize,
    /// The context that has memory for it; 0 for none.
    pub(crate) context: usize,
    pub(crate) nodes: Vec<Node>,
    /// True if a launch frees the blocks that the launch before it left live.
    pub(crate) frees: bool,
}

/// Memory of another process or API.
#[derive(Clone, Copy)]
pub(crate) struct Imported {
    pub(crate) bytes: u64,
    /// The pool that contains the memory, or else the context in which it was opened.
    pub(crate) pool: usize,
    pub(crate) context: usize,
}

impl Objects {
    /// Gives a new id to the block that was allocated at an address.
    pub(crate) fn number(&mut self, address: u64) {
        self.numbered += 1;
        self.numbers.insert(address, self.numbered);
    }

    /// Returns the GPU of a live context or of a primary context.
    pub(crate) fn context_card(&self, context: usize, gpus: usize) -> Option<usize> {
        let primary = context.checked_sub(CONTEXTS).filter(|card| *card < gpus);
        primary.or_else(|| self.contexts.get(&context).copied())
    }

    /// Returns a handle for new physical memory.
    pub(crate) fn add_physical(&mut self, card: Option<usize>, bytes: u64) -> u64 {
        let handle = free_handle(PHYSICAL, |taken| self.physical.contains_key(taken));
        self.physical.insert(handle, Physical { card, bytes, references: 1, mappings: 0 });
        handle as u64
    }
}

pub(crate) struct Array {
    pub(crate) card: usize,
    pub(crate) context: usize,
    pub(crate) block: u64,
    pub(crate) mipmapped: bool,
}

/// A handle of `cuMemCreate`. It exists while it is referenced or mapped.
pub(crate) struct Physical {
    /// The GPU that the memory is on; `None` for host memory.
    pub(crate) card: Option<usize>,
    pub(crate) bytes: u64,
    pub(crate) references: usize,
    pub(crate) mappings: usize,
}

/// Returns the first free handle from `start` on.
pub(crate) fn free_handle(start: usize, is_taken: impl Fn(&usize) -> bool) -> usize {
    (start..).step_by(16).find(|handle| !is_taken(handle)).unwrap_or(start)
}
