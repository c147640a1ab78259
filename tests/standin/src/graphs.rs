//! `libcuda`: stream capture, graphs whose nodes allocate and free, and the memory that the GPUs have mapped for them.
//!
//! As observed on an H200 with driver 580: the mapped memory grows by 32 MiB when a launch needs more. All graphs share it if their
//! launches do not overlap, which they never do here. It shrinks when it is trimmed. A node keeps its address as long as its graph exists.
//! A block that a graph does not free is live until the program frees it, and keeps its memory mapped.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::thread;

use crate::cuda::{
    Address, Device, ErrorCode, Handle, INVALID_HANDLE, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY,
    STREAM_CAPTURE_IMPLICIT, STREAM_CAPTURE_INVALIDATED, STREAM_CAPTURE_UNSUPPORTED, context, device, ready,
    stream_card,
};
use crate::driver::{Call, lock};
use crate::ffi::Out;
use crate::memory::PoolProperties;
use crate::objects::{Capture, Executable, Node, Objects, free_handle};
use crate::physical::{GRANULARITY, ON_DEVICE};
use crate::taken;

const GRAPHS: Handle = 0x3000_0000;
const EXECUTABLES: Handle = 0x3300_0000;
/// The start of addresses that belong to no GPU.
const BLOCKS: Address = 0x4800_0000_0000;
/// The mapped memory grows in steps of this size.
const STEP: u64 = 32 << 20;

/// `CU_STREAM_CAPTURE_MODE_…`
const GLOBAL: c_int = 0;
const RELAXED: c_int = 2;

/// `CUDA_GRAPH_INSTANTIATE_FLAG_…`
const AUTO_FREE_ON_LAUNCH: u64 = 1;
const UPLOAD: u64 = 2;

/// `CU_GRAPH_MEM_ATTR_…`
const USED_MEM_CURRENT: c_int = 0;
const USED_MEM_HIGH: c_int = 1;
const RESERVED_MEM_CURRENT: c_int = 2;
const RESERVED_MEM_HIGH: c_int = 3;

thread_local! {
    /// The capture mode of the calling thread.
    static MODE: Cell<c_int> = const { Cell::new(GLOBAL) };
}

/// A `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
struct AllocNode {
    properties: PoolProperties,
    access: Out<c_void>,
    accesses: usize,
    bytes: usize,
    address: Address,
}

/// A `CUDA_GRAPH_INSTANTIATE_PARAMS`.
#[derive(Clone, Copy)]
#[repr(C)]
struct InstantiateParams {
    flags: u64,
    upload_stream: Handle,
    failed: Handle,
    result: c_int,
}

// These are as in cuda.h.
const _: () = assert!(size_of::<AllocNode>() == 120 && size_of::<InstantiateParams>() == 32);

/// Rejects a call that is not allowed while a stream of the GPU is being captured, and invalidates the capture, as CUDA does.
pub(crate) fn not_capturing(call: &Call, card: usize) -> Result<(), ErrorCode> {
    if MODE.get() == RELAXED {
        return Ok(());
    }
    let (me, mode) = (thread::current().id(), MODE.get());
    let mut objects = lock(&call.driver.objects);
    let mut outcome = Ok(());
    for stream in objects.streams.values_mut().filter(|stream| stream.card == card) {
        let Some(capture) = &mut stream.capture else { continue };
        let forbids = capture.mode != RELAXED && capture.by == me || capture.mode == GLOBAL && mode == GLOBAL;
        if forbids {
            capture.broken = true;
            outcome = Err(STREAM_CAPTURE_UNSUPPORTED);
        }
    }
    outcome
}

/// Returns the graph to which calls on a stream are added as nodes, if the stream is being captured.
pub(crate) fn captured(call: &Call, stream: Handle) -> Result<Option<Handle>, ErrorCode> {
    match lock(&call.driver.objects).streams.get(&stream).and_then(|stream| stream.capture) {
        Some(Capture { broken: true, .. }) => Err(STREAM_CAPTURE_INVALIDATED),
        capture => Ok(capture.map(|capture| capture.graph)),
    }
}

/// Adds a node that allocates a block, at an address that no other node has.
pub(crate) fn add_alloc(call: &Call, graph: Handle, card: usize, bytes: u64) -> Result<(Handle, Address), ErrorCode> {
    let mut objects = lock(&call.driver.objects);
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let size = bytes.checked_next_multiple_of(GRANULARITY).ok_or(OUT_OF_MEMORY)?;
    let mut taken: Vec<(Address, u64)> = objects.graph_blocks.iter().map(|(at, (_, bytes))| (*at, *bytes)).collect();
    let nodes = objects.graphs.values().chain(objects.executables.values().map(|executable| &executable.nodes));
    taken.extend(nodes.flatten().filter_map(|node| match node {
        Node::Alloc { address, bytes, .. } => Some((*address, *bytes)),
        Node::Free(_) | Node::Kernel => None,
    }));
    taken.sort_unstable();
    let mut address = BLOCKS;
    for (start, bytes) in taken {
        if address + size <= start {
            break;
        }
        address = address.max(start + bytes);
    }
    let nodes = objects.graphs.get_mut(&graph).ok_or(INVALID_VALUE)?;
    nodes.push(Node::Alloc { card, address, bytes: size });
    Ok((graph + nodes.len(), address))
}

/// Adds a node that frees the block of another node.
pub(crate) fn add_free(call: &Call, graph: Handle, address: Address) -> Result<Handle, ErrorCode> {
    let mut objects = lock(&call.driver.objects);
    let own = |node: &&Node| matches!(node, Node::Alloc { address: own, .. } if *own == address);
    let is_known =
        objects.graphs.values().flatten().any(|node| own(&node)) || objects.graph_blocks.contains_key(&address);
    let nodes = objects.graphs.get_mut(&graph).ok_or(INVALID_VALUE)?;
    if !is_known || nodes.contains(&Node::Free(address)) {
        return Err(INVALID_VALUE);
    }
    nodes.push(Node::Free(address));
    Ok(graph + nodes.len())
}

/// Adds a node that runs a function.
pub(crate) fn add_kernel(call: &Call, graph: Handle) -> Result<Handle, ErrorCode> {
    let mut objects = lock(&call.driver.objects);
    let nodes = objects.graphs.get_mut(&graph).ok_or(INVALID_VALUE)?;
    nodes.push(Node::Kernel);
    Ok(graph + nodes.len())
}

/// Frees a block that a graph left live. Returns `None` if the address is not such a block.
pub(crate) fn free_block(call: &Call, address: Address) -> Option<()> {
    lock(&call.driver.objects).graph_blocks.remove(&address).map(drop)
}

fn start(call: &Call, stream: Handle, mode: c_int, graph: Option<Handle>) -> Result<(), ErrorCode> {
    ready(call)?;
    let mut objects = lock(&call.driver.objects);
    if objects.streams.get(&stream).is_none_or(|stream| stream.capture.is_some()) {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    let graph = match graph {
        Some(graph) if objects.graphs.contains_key(&graph) => graph,
        Some(_) => return Err(INVALID_VALUE),
        None => new_graph(&mut objects),
    };
    let capture = Capture { graph, mode, by: thread::current().id(), is_origin: true, broken: false };
    objects.streams.get_mut(&stream).ok_or(STREAM_CAPTURE_UNSUPPORTED)?.capture = Some(capture);
    Ok(())
}

/// Ends the capture on all streams that joined it.
pub(crate) fn end_capture(objects: &mut Objects, graph: Handle) {
    for stream in objects.streams.values_mut() {
        stream.capture = stream.capture.filter(|capture| capture.graph != graph);
    }
}

fn new_graph(objects: &mut Objects) -> Handle {
    // The ids of its nodes follow.
    let graph = (GRAPHS..).step_by(1 << 12).find(|graph| !objects.graphs.contains_key(graph)).unwrap_or(GRAPHS);
    objects.graphs.insert(graph, Vec::new());
    graph
}

fn instantiate(call: &Call, created: Out<Handle>, graph: Handle, flags: u64) -> Result<(), ErrorCode> {
    ready(call)?;
    let current = context(call).ok();
    let mut objects = lock(&call.driver.objects);
    let nodes = objects.graphs.get(&graph).ok_or(INVALID_VALUE)?.clone();
    let allocates = nodes.iter().any(|node| matches!(node, Node::Alloc { .. }));
    if allocates && objects.executables.values().any(|executable| executable.graph == graph) {
        return Err(NOT_SUPPORTED);
    }
    if let Some((context, _, gpu)) = current {
        let live = objects.executables.values().filter(|executable| executable.context == context);
        let others: usize = live.map(|executable| executable.nodes.len()).sum();
        taken::by_graphs(call, gpu, context, others + nodes.len())?;
    }
    let context = current.map_or(0, |(context, ..)| context);
    let handle = free_handle(EXECUTABLES, |taken| objects.executables.contains_key(taken));
    objects.executables.insert(handle, Executable { graph, context, nodes, frees: flags & AUTO_FREE_ON_LAUNCH != 0 });
    Ok(created.put(handle)?)
}

/// Maps the memory of a launch. With `works`, also runs the nodes of the graph immediately.
fn launch(call: &Call, executable: Handle, stream: Handle, works: bool) -> Result<(), ErrorCode> {
    stream_card(call, stream)?;
    let mut objects = lock(&call.driver.objects);
    let Executable { nodes, frees, .. } = objects.executables.get(&executable).ok_or(INVALID_VALUE)?.clone();
    let mut live = objects.graph_blocks.clone();
    let own = nodes.iter().filter_map(|node| match node {
        Node::Alloc { address, .. } => Some(address),
        Node::Free(_) | Node::Kernel => None,
    });
    for address in own {
        if live.remove(address).is_some() && !frees {
            return Err(INVALID_VALUE);
        }
    }
    let mut most = vec![0; call.driver.gpus.len()];
    for node in &nodes {
        match node {
            Node::Alloc { card, address, bytes } => {
                live.insert(*address, (*card, *bytes));
                let on_card: u64 = live.values().filter(|(on, _)| on == card).map(|(_, bytes)| bytes).sum();
                most[*card] = most[*card].max(on_card);
            }
            Node::Free(address) => {
                live.remove(address).ok_or(INVALID_VALUE)?;
            }
            Node::Kernel => {}
        }
    }
    for (card, most) in most.into_iter().enumerate().filter(|(_, most)| *most > 0) {
        call.on(card)?.memory().map_for_graphs(most.next_multiple_of(STEP))?;
    }
    if works {
        let new: Vec<_> = live.keys().filter(|address| !objects.graph_blocks.contains_key(address)).copied().collect();
        for address in new {
            objects.number(address);
        }
        objects.graph_blocks = live;
    }
    Ok(())
}

dispatched! { calls;
    fn cuStreamBeginCapture(stream: Handle) |call| {
        start(call, stream, GLOBAL, None)
    }

    fn cuStreamBeginCapture_v2 | cuStreamBeginCapture_v2_ptsz(stream: Handle, mode: c_int) |call| {
        start(call, stream, mode, None)
    }

    fn cuStreamBeginCaptureToGraph(stream: Handle, graph: Handle, _nodes: Out<c_void>, _edges: Out<c_void>, _count: usize, mode: c_int) |call| {
        start(call, stream, mode, Some(graph))
    }

    fn cuStreamEndCapture | cuStreamEndCapture_ptsz(stream: Handle, graph: Out<Handle>) |call| {
        ready(call)?;
        let mut objects = lock(&call.driver.objects);
        let capture = objects.streams.get(&stream).ok_or(INVALID_HANDLE)?.capture.ok_or(INVALID_VALUE)?;
        if !capture.is_origin {
            return Err(STREAM_CAPTURE_UNSUPPORTED);
        }
        end_capture(&mut objects, capture.graph);
        if capture.broken {
            objects.graphs.remove(&capture.graph);
            graph.put(0)?;
            return Err(STREAM_CAPTURE_INVALIDATED);
        }
        Ok(graph.put(capture.graph)?)
    }

    fn cuStreamIsCapturing(stream: Handle, status: Out<c_int>) |call| {
        let (card, _) = stream_card(call, stream)?;
        let objects = lock(&call.driver.objects);
        // The legacy stream waits for the streams that wait for it.
        if stream == 0 && objects.streams.values().any(|other| other.card == card && other.blocking && other.capture.is_some()) {
            return Err(STREAM_CAPTURE_IMPLICIT);
        }
        let capture = objects.streams.get(&stream).and_then(|stream| stream.capture);
        Ok(status.put(capture.map_or(0, |capture| if capture.broken { 2 } else { 1 }))?)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_int>) |_call| {
        let requested = mode.get()?;
        if !(GLOBAL..=RELAXED).contains(&requested) {
            return Err(INVALID_VALUE);
        }
        Ok(mode.put(MODE.replace(requested))?)
    }

    fn cuGraphCreate(created: Out<Handle>, flags: c_int) |call| {
        ready(call)?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let graph = new_graph(&mut lock(&call.driver.objects));
        Ok(created.put(graph)?)
    }

    fn cuGraphDestroy(graph: Handle) |call| {
        ready(call)?;
        lock(&call.driver.objects).graphs.remove(&graph).map(drop).ok_or(INVALID_VALUE)
    }

    fn cuGraphAddMemAllocNode(created: Out<Handle>, graph: Handle, _nodes: Out<c_void>, _count: usize, parameters: Out<AllocNode>) |call| {
        ready(call)?;
        let given = parameters.get()?;
        if given.properties.location.kind != ON_DEVICE {
            return Err(INVALID_VALUE);
        }
        let (card, _) = device(call, given.properties.location.id)?;
        let (node, address) = add_alloc(call, graph, card, given.bytes as u64)?;
        parameters.put(AllocNode { address, ..given })?;
        Ok(created.put(node)?)
    }

    fn cuGraphAddMemFreeNode(created: Out<Handle>, graph: Handle, _nodes: Out<c_void>, _count: usize, address: Address) |call| {
        ready(call)?;
        let node = add_free(call, graph, address)?;
        Ok(created.put(node)?)
    }

    fn cuGraphAddKernelNode | cuGraphAddKernelNode_v2(created: Out<Handle>, graph: Handle, _nodes: Out<c_void>, _count: usize, _parameters: Out<c_void>) |call| {
        ready(call)?;
        let node = add_kernel(call, graph)?;
        Ok(created.put(node)?)
    }

    fn cuGraphInstantiateWithFlags(created: Out<Handle>, graph: Handle, flags: u64) |call| {
        instantiate(call, created, graph, flags)
    }

    fn cuGraphInstantiate | cuGraphInstantiate_v2(created: Out<Handle>, graph: Handle, _failed: Out<Handle>, _log: Out<c_char>, _length: usize) |call| {
        instantiate(call, created, graph, 0)
    }

    fn cuGraphInstantiateWithParams | cuGraphInstantiateWithParams_ptsz(created: Out<Handle>, graph: Handle, parameters: Out<InstantiateParams>) |call| {
        let given = parameters.get()?;
        instantiate(call, created, graph, given.flags)?;
        if given.flags & UPLOAD != 0 {
            launch(call, created.get()?, given.upload_stream, false)?;
        }
        Ok(parameters.put(InstantiateParams { result: 0, ..given })?)
    }

    fn cuGraphExecDestroy(executable: Handle) |call| {
        ready(call)?;
        lock(&call.driver.objects).executables.remove(&executable).map(drop).ok_or(INVALID_VALUE)
    }

    fn cuGraphUpload(executable: Handle, stream: Handle) |call| {
        launch(call, executable, stream, false)
    }

    fn cuGraphLaunch | cuGraphLaunch_ptsz(executable: Handle, stream: Handle) |call| {
        launch(call, executable, stream, true)
    }

    fn cuDeviceGetGraphMemAttribute(of: Device, attribute: c_int, value: Out<u64>) |call| {
        let (_, gpu) = device(call, of)?;
        let (mapped, most) = gpu.memory().mapped_for_graphs();
        Ok(value.put(match attribute {
            USED_MEM_CURRENT | RESERVED_MEM_CURRENT => mapped,
            USED_MEM_HIGH | RESERVED_MEM_HIGH => most,
            _ => return Err(INVALID_VALUE),
        })?)
    }

    fn cuDeviceSetGraphMemAttribute(of: Device, attribute: c_int, value: Out<u64>) |call| {
        let (_, gpu) = device(call, of)?;
        if !matches!(attribute, USED_MEM_HIGH | RESERVED_MEM_HIGH) || value.get()? != 0 {
            return Err(INVALID_VALUE);
        }
        gpu.memory().reset_mapped_high();
        Ok(())
    }

    fn cuDeviceGraphMemTrim(of: Device) |call| {
        let (card, gpu) = device(call, of)?;
        let objects = lock(&call.driver.objects);
        let live: u64 = objects.graph_blocks.values().filter(|(on, _)| *on == card).map(|(_, bytes)| bytes).sum();
        gpu.memory().unmap_for_graphs(live.next_multiple_of(STEP));
        Ok(())
    }
}
