//! Executes or skips nodes of graphs.

use cudarc::driver::sys;

use super::{
    copies::{self, Rows},
    state::{CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED, Real, SUCCESS, get, inside, is_dry},
    work,
};

/// # Safety
/// `at` must be the address of a `CUDA_KERNEL_NODE_PARAMS` of any version.
pub(super) unsafe fn is_kernel_skipped(at: u64) -> bool {
    // SAFETY: the struct starts with the function and the grid; its 6th and 7th words are the parameters in the two forms.
    unsafe { work::is_skipped(get(at), get(at + 8) >> 32, get(at + 40), get(at + 48)) }
}

/// Adds a node that does nothing, instead of another one.
///
/// # Safety
/// The words must be the address for the node, the graph, the dependencies, and their number.
#[allow(clippy::cast_possible_truncation, reason = "an address is as wide as `usize` on these targets")]
pub(super) unsafe fn empty_node(words: &[u64]) -> u32 {
    let [out, graph, nodes, count, ..] = *words else { return CUDA_ERROR_INVALID_VALUE };
    // SAFETY: these are the arguments of the program's own call.
    inside(|| unsafe { sys::cuGraphAddEmptyNode(out as *mut _, graph as *mut _, nodes as *const _, count as usize) })
        as u32
}

/// Returns the result of the call for a node that is skipped. Returns `None` if the driver gets the node.
///
/// # Safety
/// `at` must be the address of a `CUgraphNodeParams`.
pub(super) unsafe fn skipped_node(at: u64) -> Option<u32> {
    // SAFETY: the struct starts with the type of the node, and its parameters start at byte 16.
    unsafe {
        match (at as *const u32).read() {
            0 => is_kernel_skipped(at + 16).then_some(SUCCESS),
            1 => copies::skipped_node(Rows::of_3d(at + 32).as_ref()),
            2 => is_dry(get(at + 16)).then_some(SUCCESS),
            _ => None,
        }
    }
}

/// # Safety
/// `words` must be the arguments of `cuGraphAddNode`, and `parameters` the index of the `CUgraphNodeParams`.
pub(super) unsafe fn node(words: &[u64], parameters: usize, real: Real<'_>) -> u32 {
    const CU_GRAPH_NODE_TYPE_MEM_ALLOC: u32 = 10;
    let at = words[parameters];
    // SAFETY: `at` is the address of the `CUgraphNodeParams`, by the contract of this function, and the other words are the driver's
    // arguments.
    unsafe {
        if (at as *const u32).read() == CU_GRAPH_NODE_TYPE_MEM_ALLOC {
            return CUDA_ERROR_NOT_SUPPORTED;
        }
        let without_edges = [words[0], words[1], words[2], words[parameters - 1]];
        match skipped_node(at) {
            Some(SUCCESS) => empty_node(&without_edges),
            skipped => skipped.unwrap_or_else(real),
        }
    }
}
