//! Used and peak memory of a model in ONNX Runtime on a GPU: `cargo run`. With `arena`, ONNX Runtime keeps its own arena, and a gauge
//! reads it; with `cpu` as well, but without a GPU.

use std::{
    error::Error,
    ffi::CStr,
    ptr,
    sync::{Mutex, OnceLock, PoisonError},
};

use gpumem::{Gauge, gauge::set_gauge, gpu_mem_trace};
use ort::{
    AsPointer,
    editor::{Graph, Model, Node, ONNX_DOMAIN, Opset},
    environment::Environment,
    ep, inputs,
    memory::{AllocationDevice, Allocator, AllocatorType, MemoryInfo, MemoryType},
    ortsys,
    session::{Session, SessionOutputs, builder::SessionBuilder},
    value::{Outlet, Shape, SymbolicDimensions, Tensor, TensorElementType, ValueType},
};

const WIDTHS: [i64; 3] = [1024, 8192, 2048];

/// The arena of the session. [`load`] sets it.
static ARENA: OnceLock<Mutex<Allocator>> = OnceLock::new();

/// Makes later sessions with `with_env_allocators` allocate each tensor from a pool of the driver, instead of from an arena.
/// Without CUDA's libraries, ONNX Runtime aborts the process here, so add the CUDA provider to the session's options first.
fn allocate_in_driver(environment: &Environment) -> ort::Result<()> {
    let place = place(AllocationDevice::CUDA)?;
    let (keys, values) = ([c"use_cuda_mempool".as_ptr()], [1]);
    let mut config = ptr::null_mut();
    ortsys![unsafe CreateArenaCfgV2(keys.as_ptr(), values.as_ptr(), keys.len(), &mut config)?];
    let (environment, cuda) = (environment.ptr().cast_mut(), c"CUDAExecutionProvider".as_ptr());
    ortsys![unsafe CreateAndRegisterAllocatorV2(environment, cuda, place.ptr(), config, ptr::null(), ptr::null(), 0)?];
    ortsys![unsafe ReleaseArenaCfg(config)];
    Ok(())
}

/// Returns the bytes of tensors in the arena of a session.
fn bytes_in_use(arena: &Allocator) -> ort::Result<u64> {
    let mut statistics = ptr::null_mut();
    ortsys![unsafe AllocatorGetStats(arena.ptr(), &mut statistics)?];
    let in_use = ortsys![unsafe GetKeyValue(statistics, c"InUse".as_ptr())];
    // SAFETY: the text lives until the statistics are released.
    let bytes = (!in_use.is_null()).then(|| unsafe { CStr::from_ptr(in_use) }.to_string_lossy().parse());
    ortsys![unsafe ReleaseKeyValuePairs(statistics)];
    bytes.and_then(Result::ok).ok_or_else(|| ort::Error::new("the allocator has no statistics: it is not an arena"))
}

fn place(device: AllocationDevice) -> ort::Result<MemoryInfo<'static>> {
    MemoryInfo::new(device, 0, AllocatorType::Device, MemoryType::Default)
}

/// Returns a model of two matrix products, each followed by Relu. The weights have 96 MiB.
fn model() -> ort::Result<Model> {
    let shape = |name, width| {
        let (ty, shape, dimension_symbols) =
            (TensorElementType::Float32, Shape::new([-1, width]), SymbolicDimensions::empty(2));
        Outlet::new(name, ValueType::Tensor { ty, shape, dimension_symbols })
    };
    let mut graph = Graph::new()?;
    graph.set_inputs([shape("y0", WIDTHS[0])])?;
    graph.set_outputs([shape("y2", WIDTHS[2])])?;
    for (number, widths) in WIDTHS.windows(2).enumerate() {
        let (input, weight, product, output) =
            (format!("y{number}"), format!("w{number}"), format!("x{number}"), format!("y{}", number + 1));
        graph.add_node(Node::new("MatMul", ONNX_DOMAIN, &product, [&input, &weight], [&product], [])?)?;
        graph.add_node(Node::new("Relu", ONNX_DOMAIN, &output, [&product], [&output], [])?)?;
        graph.add_initializer(weight, Tensor::<f32>::new(&Allocator::default(), [widths[0], widths[1]])?, true)?;
    }
    let mut model = Model::new([Opset::new(ONNX_DOMAIN, 22)?])?;
    model.set_graph(graph)?;
    Ok(model)
}

#[gpu_mem_trace]
fn load(options: &SessionBuilder, device: AllocationDevice) -> ort::Result<Session> {
    let session = model()?.into_session(options)?;
    // This program has only one session, so there is only one arena.
    let _ = ARENA.set(Mutex::new(Allocator::new(&session, place(device)?)?));
    Ok(session)
}

#[gpu_mem_trace]
fn run(session: &mut Session, batch: i64) -> ort::Result<SessionOutputs<'_>> {
    session.run(inputs![Tensor::<f32>::new(&Allocator::default(), [batch, WIDTHS[0]])?])
}

fn main() -> Result<(), Box<dyn Error>> {
    let mode = std::env::args().nth(1).unwrap_or_default();
    let environment = ort::init().build()?;
    let mut options = Session::builder(&environment)?;
    if mode != "cpu" {
        options = options.with_execution_providers([ep::CUDA::default().build().error_on_failure()])?;
    }
    if mode.is_empty() {
        allocate_in_driver(&environment)?;
        options = options.with_env_allocators()?;
    } else {
        let in_use = |arena: &Mutex<Allocator>| bytes_in_use(&arena.lock().unwrap_or_else(PoisonError::into_inner));
        set_gauge(Gauge::custom("ONNX Runtime's arena", move || ARENA.get().map_or(Ok(0), in_use)));
    }
    let (device, batch) = if mode == "cpu" { (AllocationDevice::CPU, 64) } else { (AllocationDevice::CUDA, 2048) };
    let mut session = load(&options, device)?;
    for _ in 0..5 {
        run(&mut session, batch)?;
    }
    if mode.is_empty() {
        println!("{}", gpumem::summary());
    }
    Ok(())
}
