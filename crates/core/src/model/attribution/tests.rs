use super::*;

/// Parses a stack with one frame per line, innermost first: `module | function | file:line`; `-` if it is not known.
fn stack(text: &str) -> Vec<Frame> {
    let frame = |line: &str| {
        let mut parts = line.split(" | ").map(|part| Some(part.trim().to_owned()).filter(|part| part != "-"));
        let (module, function) = (parts.next().flatten(), parts.next().flatten());
        let place = parts.next().flatten();
        let (file, number) = match place.as_deref().and_then(|place| place.rsplit_once(':')) {
            Some((file, number)) => (Some(file.to_owned()), number.parse().ok()),
            None => (place, None),
        };
        Frame { function, file, line: number, column: None, module }
    };
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(frame).collect()
}

#[track_caller]
fn check(text: &str, attribution: Option<&str>, line: Option<&str>) {
    let frames = stack(text);
    assert_eq!(library(&frames), attribution, "{text}");
    assert_eq!(user_line(&frames).map(|(line, _)| line).map(ToString::to_string).as_deref(), line, "{text}");
}

const CUDARC: &str =
    "/home/me/.cargo/registry/src/index.crates.io-0123456789abcdef/cudarc-0.19.10/src/driver/result.rs";

#[test]
fn the_frames_of_the_program_are_outside_the_driver() {
    let frame = |function: &str, module: &str| Frame {
        function: Some(function.to_owned()),
        module: Some(module.to_owned()),
        ..Frame::default()
    };
    let driver = frame("cuMemAlloc_v2", "/lib/libcuda.so.1");
    let (user, own) = (frame("app::train", "/bin/app"), frame("gpumem::sim::SimGpu::alloc", "/bin/app"));
    let observed =
        [frame("gpumem::sys::cupti::callback", "/bin/app"), frame("", "libcupti.so.13"), driver, user.clone()];
    assert_eq!(program_frames(&observed), &observed[3..]);
    let simulated = [own.clone(), own, user];
    assert_eq!(program_frames(&simulated), &simulated[2..]);
    assert_eq!(program_frames(&[]), []);
}

#[test]
fn files_are_relative_to_the_folder() {
    for (file, short) in [
        ("/home/me/app/src/main.rs", "src/main.rs"),
        ("/home/me/apples/src/main.rs", "/home/me/apples/src/main.rs"),
        ("src/main.rs", "src/main.rs"),
        ("/home/me/.cargo/registry/src/index.crates.io-19/candle-core-0.9/src/lib.rs", "candle-core-0.9/src/lib.rs"),
        ("/home/me/.cargo/git/checkouts/burn-3f2a/41d0a5b/src/lib.rs", "41d0a5b/src/lib.rs"),
    ] {
        let frame = Frame { file: Some(file.to_owned()), ..Frame::default() };
        assert_eq!(frame.relative_to("/home/me/app").file.as_deref(), Some(short));
        assert_eq!(frame.relative_to("").file.as_deref() == Some(file), !file.contains(".cargo"));
    }
}

#[test]
fn a_program_that_allocates_through_cudarc() {
    let text = format!(
        "/app/train | gpumem::sys::cupti::callback | /app/gpumem/src/sys/cupti.rs:10
         /cuda/libcupti.so.13 | - | -
         /lib/libcuda.so.580.159 | - | -
         /lib/libcuda.so.580.159 | cuMemAlloc_v2 | -
         /app/train | cudarc::driver::result::malloc_sync | {CUDARC}:812
         /app/train | alloc_zeros<f32> | {CUDARC}:1290
         /app/train | <core::result::Result<T,E> as core::ops::try_trait::Try>::branch | /rustc/59807/library/core/src/result.rs:2
         /app/train | train::model::Layer::new | src/model.rs:42
         /app/train | train::main | src/main.rs:7
         /app/train | core::ops::function::FnOnce::call_once | /rustc/59807/library/core/src/ops/function.rs:250"
    );
    check(&text, Some("train"), Some("src/model.rs:42"));
}

#[test]
fn a_program_that_allocates_through_a_framework() {
    const CANDLE: &str = "/home/me/.cargo/registry/src/index.crates.io-0123456789abcdef/candle-core-0.9.1/src/cuda.rs";
    let framework = format!(
        "/app/train | cudarc::driver::result::malloc_sync | {CUDARC}:812
         /app/train | candle_core::cuda_backend::alloc | {CANDLE}:70
         /app/train | <T as candle_core::Module>::forward | {CANDLE}:90"
    );
    let program = "\n/app/train | train::forward | src/model.rs:42\n/app/train | train::main | src/main.rs:7";
    check(&format!("{framework}{program}"), Some("train"), Some("src/model.rs:42"));
    // On a thread of the framework, there are no other lines.
    check(&framework, Some("train"), Some(&format!("{CANDLE}:70")));
}

#[test]
fn a_program_without_symbols() {
    let text = "/app/train | - | -
         /cuda/libcupti.so.13 | - | -
         /lib/libcuda.so.1 | cuMemAlloc_v2 | -
         /app/train | - | -
         /lib/libc.so.6 | __libc_start_call_main | ./csu/libc_start_call_main.h:58
         /app/train | _start | -";
    check(text, Some("train"), None);
    // The program contains the callback as well, which did not allocate.
    check(&text.replace("cuMemAlloc_v2 | -", "- | -\n/env/libcublas.so.13 | - | -"), Some("cuBLAS"), None);
    // Only the names of functions are known, from the symbol table.
    let text = "/app/train | cudarc::driver::result::malloc_sync | -
         /app/train | train::forward | -
         /app/train | main | -";
    check(text, Some("train"), Some("train::forward"));
    check("/app/train | std::rt::lang_start | -\n/app/train | main | -", Some("train"), None);
    let framework = "/app/train | cudarc::driver::result::malloc_sync | -
         /app/train | candle_core::cuda_backend::alloc | -
         /app/train | <T as candle_nn::Module>::forward | -";
    check(&format!("{framework}\n/app/train | train::step | -"), Some("train"), Some("train::step"));
    check(framework, Some("train"), Some("candle_core::cuda_backend::alloc"));
    check("/app/train | orth::alloc | -\n/app/train | train::step | -", Some("train"), Some("orth::alloc"));
}

#[test]
fn a_program_with_the_cuda_runtime_inside() {
    let text = "/app/train | libcudart_static_d9d6 | -
         /app/train | cudaMalloc | -
         /app/train | cudaMallocHelper::make | src/a.cu:9
         /app/train | main | -";
    check(text, Some("train"), Some("src/a.cu:9"));
    check(&text.replace("src/a.cu:9", "-").replace("cudaMallocHelper::make", "work"), Some("train"), Some("work"));
}

/// Headers of the CUDA toolkit, of the standard library and of thrust and cub are between the driver and a line in C++.
#[test]
fn a_program_in_cpp_has_the_line_that_uses_a_header() {
    for header in [
        "cudaError cudaMalloc<float>(float**, unsigned long) | /usr/local/cuda/include/cuda_runtime.h:879",
        "cudaMalloc<float> | /usr/local/cuda-12.8/bin/../targets/x86_64-linux/include/cuda_runtime.h:879",
        "cudaMallocAsync<float> | /nix/store/0a-cuda_cudart-12.4/include/cuda_runtime.h:680",
        "cuda::mr::device_memory_resource::allocate | /usr/local/cuda-13.0/targets/sbsa-linux/include/cccl/cuda/mr:8",
        "cuda::device_buffer | /opt/nvidia/hpc_sdk/Linux_x86_64/24.1/cuda/12.3/include/cuda/buffer:8",
        "cudaLaunchKernel<char> | /usr/local/cuda-12.8/include/cuda_runtime.h:216",
        "__device_stub__Z3addPf(float*) | /tmp/tmpxft_00001f_00-6_a.cudafe1.stub.c:14",
        "cudaMalloc<float> | /v/lib/python3.12/site-packages/nvidia/cuda_runtime/include/cuda_runtime.h:879",
        "fill | /usr/include/c++/13/bits/stl_vector.h:1",
        "fill | /usr/include/x86_64-linux-gnu/c++/13/bits/x.h:1",
        "fill | /opt/rh/gcc-toolset-13/root/usr/include/c++/13/bits/stl_vector.h:1",
        "fill | /usr/lib/gcc/x86_64-linux-gnu/13/../../../../include/c++/13/bits/stl_vector.h:1",
        "fill | /usr/lib/llvm-18/include/c++/v1/vector:1",
        "grow | /home/me/cccl/thrust/thrust/device_vector.h:1",
        "grow | /home/me/app/build/_deps/cccl-src/cub/cub/device/device_radix_sort.cuh:1",
        "grow | /opt/conda/include/thrust/detail/vector_base.inl:1",
        "grow | /home/me/cccl/libcudacxx/include/cuda/std/__memory/x.h:1",
        "void thrust::THRUST_200500_800_NS::detail::vector_base<float>::resize<int>(int) | vendor/vector_base.inl:4",
        "cudaError cub::DeviceReduce::Sum<float*>(void*, unsigned long&) | -",
        "void std::_Construct<Layer, int>(Layer*, int&&) | -",
        "cudaError cudaMalloc<float>(float**, unsigned long) | -",
        "void* __gnu_cxx::new_allocator<float>::allocate(unsigned long) | -",
        "void cuda::std::__4::__construct_at<float>(float*) | -",
    ] {
        let text = format!(
            "/lib/libcuda.so.1 | cuMemAlloc_v2 | -\n/app/train | {header}
             /app/train | Buffer::Buffer(unsigned long) | /home/me/app/include/buffer.h:12
             /app/train | main | /home/me/app/a.cu:9"
        );
        check(&text, Some("train"), Some("/home/me/app/include/buffer.h:12"));
        let frames = stack(&text);
        let (_, caller) = user_line(&frames).unwrap();
        assert_eq!(caller.unwrap().to_string(), "/home/me/app/a.cu:9");
        check(&format!("/app/train | {header}"), Some("train"), None);
    }
    // The return type of a function does not show where it is, and a user's folders may have such names.
    for line in [
        "std::vector<float, std::allocator<float> > make_buffer<float>(unsigned long) | src/a.cu:9",
        "cudaError my_alloc<float>(float**) | /home/me/cuda/include/alloc.cuh:9",
        "void (anonymous namespace)::grow<std::plus<int> >(thrust::device_vector<float>&) | /home/me/thrust/src/main.cu:9",
        "main | /usr/local/cuda/samples/0_Simple/vectorAdd/vectorAdd.cu:9",
        "cuda::alloc(unsigned long) | /home/me/app/include/cuda/alloc.h:9",
    ] {
        let place = line.split(" | ").nth(1);
        check(&format!("/lib/libcuda.so.1 | cuMemAlloc_v2 | -\n/app/train | {line}"), Some("train"), place);
    }
    let named = "thrust::device_vector<float> made<float>(unsigned long)";
    check(&format!("/app/train | {named} | -"), Some("train"), Some(named));
    check(
        "/app/train | cudaError mine::grow<float>(float**) | -",
        Some("train"),
        Some("cudaError mine::grow<float>(float**)"),
    );
}

#[test]
fn a_library_that_allocates_for_itself() {
    let text = "/app/train | gpumem::sys::cupti::callback | -
         /cuda/libcupti.so.13 | - | -
         /lib/libcuda.so.1 | cuMemAlloc_v2 | -
         /env/libcudart.so.13 | cudaMalloc | -
         /env/libcublasLt.so.13 | - | -
         /env/libcublas.so.13 | cublasCreate_v2 | -
         /app/train | cudarc::cublas::result::create_handle | -
         /app/train | train::Blas::new | src/blas.rs:9";
    check(text, Some("cuBLASLt"), Some("src/blas.rs:9"));
}

#[test]
fn a_simulated_device_has_no_driver() {
    let text = "/app/train | gpumem::source::sim::SimGpu::alloc | /home/me/gpumem/gpumem/src/source/sim.rs:91
         /app/train | alloc | /home/me/.cargo/registry/src/x/gpumem-0.1.0/src/source/sim.rs:91
         /app/train | quickstart::main | examples/examples/quickstart.rs:12";
    check(text, Some("train"), Some("examples/examples/quickstart.rs:12"));
}

#[test]
fn unknown_frames_have_no_library_and_no_line() {
    check("", None, None);
    check("- | - | -", None, None);
    check("/lib/libcuda.so.1 | cuMemAlloc_v2 | -", None, None);
}

#[test]
fn libraries_have_their_usual_names() {
    for (module, name) in [
        ("/env/nvidia/cublas/lib/libcublas.so.13", "cuBLAS"),
        ("/env/nvidia/cublas/lib/libcublasLt.so.13.0.2", "cuBLASLt"),
        ("libcudnn_engines_precompiled.so.9", "cuDNN"),
        ("libnccl.so.2", "NCCL"),
        ("libcufft.so.12", "cuFFT"),
        ("libcusparse.so.12", "cuSPARSE"),
        ("libcusparseLt.so.0", "cuSPARSELt"),
        ("libcusolverMg.so.12", "cuSOLVER"),
        ("libcurand-1a2b3c4d.so.10", "cuRAND"),
        ("libnvrtc.so.13", "NVRTC"),
        ("libnvinfer.so.10", "TensorRT"),
        ("libnvinfer_plugin.so.10", "TensorRT"),
        ("libtorch_cuda.so", "PyTorch"),
        ("libc10_cuda.so", "PyTorch"),
        ("xla_cuda_plugin.so", "XLA"),
        ("libonnxruntime_providers_cuda.so", "ONNX Runtime"),
        ("onnxruntime_pybind11_state.cpython-312-x86_64-linux-gnu.so", "ONNX Runtime"),
        ("libtensorflow_framework.so.2", "TensorFlow"),
        ("/usr/lib/x86_64-linux-gnu/libxgboost.so.2.0.2", "XGBoost"),
        ("/v/site-packages/xgboost/lib/libxgboost.so", "XGBoost"),
        ("/opt/libmine.so.2", "libmine.so.2"),
        ("/usr/bin/python3.12", "python3.12"),
        ("/v/lib/python3.12/site-packages/cupy_backends/cuda/api/runtime.cpython-312-x86_64-linux-gnu.so", "CuPy"),
        ("/v/lib/python3.12/site-packages/torch/_C.cpython-312-x86_64-linux-gnu.so", "PyTorch"),
        ("/v/site-packages/torch/lib/libc10_cuda.so", "PyTorch"),
        ("/v/site-packages/nvidia/cublas/lib/libcublas.so.12", "cuBLAS"),
        ("/v/site-packages/nvidia/new/lib/libnew.so.12", "libnew.so.12"),
        ("/v/site-packages/flash_attn/_C.so", "flash_attn"),
        ("/v/site-packages/flash_attn_2_cuda.cpython-312-x86_64-linux-gnu.so", "flash_attn_2_cuda"),
        ("/usr/lib/python3/dist-packages/mine.libs/libhelp-1a2b.so.2", "mine"),
        ("/v/site-packages/.so", ".so"),
        // These begin like known ones.
        ("libcudaq.so", "libcudaq.so"),
        ("libcublasser.so", "libcublasser.so"),
    ] {
        check(&format!("/lib/libcuda.so.1 | - | -\n{module} | - | -"), Some(name), None);
    }
    for driver in ["libcupti.so.13", "libcuda.so.1", "libcuda.so.580.159.01", "libcudart-d0da41ae.so.11.0"] {
        check(&format!("/lib/{driver} | cudaMalloc | -"), None, None);
    }
}

#[test]
fn a_line_in_a_framework_is_not_the_users() {
    let text = "/lib/libcuda.so.1 | cuMemAlloc_v2 | -
         /opt/xgboost/lib/libxgboost.so | xgboost::tree::GPUHistMaker::Update | -
         /opt/xgboost/lib/libxgboost.so | XGBoosterUpdateOneIter | /src/xgboost/src/c_api/c_api.cc:1000
         /app/train | fit | src/fit.cpp:12";
    check(text, Some("XGBoost"), Some("src/fit.cpp:12"));
}

#[test]
fn the_crates_of_a_function() {
    for (function, crates) in [
        ("core::mem::drop", &["core"][..]),
        ("<cudarc::driver::CudaStream>::alloc::<f32>", &["cudarc"]),
        ("<&mut cudarc::driver::CudaStream as core::fmt::Debug>::fmt", &["cudarc", "core"]),
        ("_<train::Model as core::ops::drop::Drop>::drop", &["train", "core"]),
        ("<F as core::ops::function::FnOnce<A>>::call_once", &["core"]),
        ("<&dyn core::ops::function::Fn() as core::ops::function::FnOnce<()>>::call_once", &["core", "core"]),
        ("<[T] as train::Shape>::rank", &["train"]),
        ("train::cast::<u8 as core::Any>", &["train"]),
        ("cuMemAlloc_v2", &[]),
        ("call_once<fn(), ()>", &[]),
        ("", &[]),
    ] {
        assert_eq!(crates_of(function), crates, "{function}");
    }
}

#[test]
fn the_crate_of_a_file() {
    let of = |file: &str, function: Option<&str>| {
        let frame = Frame { file: Some(file.into()), function: function.map(Into::into), ..Frame::default() };
        frame.is_of(CRATES)
    };
    for file in [
        CUDARC,
        "/home/me/.cargo/git/checkouts/cudarc-3f2a91c07be4d586/41d0a5b/src/lib.rs",
        "/home/me/app/vendor/cudarc/src/driver/result.rs",
        "/rustc/59807616e1fa2540724bfbac14d7976d7e4a3860/library/alloc/src/boxed.rs",
        "/home/me/.rustup/toolchains/stable/lib/rustlib/src/rust/library/core/src/iter/mod.rs",
        "/rust/deps/hashbrown-0.16.1/src/raw.rs",
    ] {
        assert!(of(file, None), "{file}");
    }
    for file in [
        "src/main.rs",
        "/home/me/app/core/src/lib.rs",
        "/home/me/cudarc-experiments/src/main.rs",
        "/home/me/gpumem/examples/examples/quickstart.rs",
        "/home/me/gpumem-demo/src/main.rs",
    ] {
        assert!(!of(file, Some("demo::main")), "{file}");
    }
    // A user's trait for a type of cudarc, and the reverse.
    assert!(!of("src/ext.rs", Some("<cudarc::driver::CudaStream as demo::Ext>::zeros")));
    assert!(!of("src/ext.rs", Some("<demo::Buffer as core::ops::drop::Drop>::drop")));
}

/// Debug information may contain only the short name of a function.
#[test]
fn a_checkout_of_gpumem_is_known_by_its_folders() {
    for (file, is_own) in [
        (concat!(env!("CARGO_MANIFEST_DIR"), "/src/model/frame.rs"), true),
        ("/home/ada/gpumem/crates/driver/src/sys/stack.rs", true),
        ("/home/ada/.cargo/git/checkouts/gpumem-3f2a91c07be4d586/41d0a5b/crates/driver/src/sys/stack.rs", true),
        ("/home/ada/train/crates/driver/src/main.rs", false),
        ("/home/ada/gpumem/crates/driver/tests/main.rs", false),
        ("/home/ada/gpumem/gpumem/src/lib.rs", true),
        ("/home/ada/gpumem/examples/src/lib.rs", false),
    ] {
        let frames = stack(&format!("/bin/app | run | {file}:7"));
        assert_eq!(frames[0].is_of_gpumem(), is_own, "{file}");
    }
}

#[test]
fn a_pool_in_c_is_not_hidden_behind_gpumem() {
    for (module, sources) in
        [("/opt/libgpumem_c.so", true), ("/opt/libgpumem_c.so", false), ("/bin/app", true), ("/bin/app", false)]
    {
        let file = |file: &str| if sources { file.to_owned() } else { "-".to_owned() };
        let text = format!(
            "{module} | gpumem::session::pools::Pool::allocated | {}
             {module} | gpumem_c::sys::gpumem_pool_allocated::{{{{closure}}}} | {}
             {module} | std::panic::catch_unwind | {}
             {module} | gpumem_pool_allocated | {}
             /bin/app | take | pool.c:14
             /bin/app | main | pool.c:30",
            file("/src/gpumem/src/session/pools.rs:89"),
            file("/src/gpumem/crates/c/src/sys.rs:44"),
            file("/rustc/59807/library/std/src/panic.rs:359"),
            file("/src/gpumem/crates/c/src/sys.rs:44"),
        );
        check(&text, Some(file_name(module)), Some("pool.c:14"));
        let frames = stack(&text);
        assert_eq!(readable_frames(&frames), frames[4..].iter().collect::<Vec<_>>(), "{text}");
    }
}

#[test]
fn the_users_line_in_python() {
    let python = |file: &str, line| Frame {
        file: Some(file.to_owned()),
        line: Some(line),
        function: Some("forward".to_owned()),
        ..Frame::default()
    };
    let native = |module: &str| Frame {
        module: Some(module.to_owned()),
        function: Some("unknown_extension".to_owned()),
        file: Some("/build/extension.cpp".to_owned()),
        ..Frame::default()
    };
    let package = "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py";
    let frames = [
        native("/venv/lib/libextension.so"),
        python(package, 1773),
        python("/home/me/model.py", 12),
        python(package, 1784),
        python("<frozen runpy>", 88),
        python("/home/me/train.py", 40),
        python("/usr/lib/python3.12/threading.py", 1010),
    ];
    let (line, caller) = user_line(&frames).unwrap();
    assert_eq!(
        (line.to_string(), caller.unwrap().to_string()),
        ("/home/me/model.py:12".into(), "/home/me/train.py:40".into())
    );
    assert_eq!(library(&frames), Some("libextension.so"));
    // A notebook cell, and a program that consists of packages.
    let frames = [python("/tmp/ipykernel_17/881.py", 3), python("<stdin>", 1)];
    assert_eq!(user_line(&frames).unwrap().0.to_string(), "/tmp/ipykernel_17/881.py:3");
    let frames = [native("/lib/x.so"), python(package, 1773)];
    assert_eq!(user_line(&frames).unwrap().0.line, Some(1773));
}

#[test]
fn a_frame_is_printed_like_compilers_do() {
    let frame = Frame { file: Some("src/a.rs".into()), line: Some(3), column: Some(9), ..Frame::default() };
    assert_eq!(frame.to_string(), "src/a.rs:3:9");
    assert_eq!(Frame { line: None, ..frame }.to_string(), "src/a.rs");
    let frame = Frame { module: Some("/lib/libcublas.so.13".into()), ..Frame::default() };
    assert_eq!(frame.to_string(), "libcublas.so.13");
    assert_eq!(Frame { function: Some("a::b".into()), ..frame }.to_string(), "a::b");
    assert_eq!(Frame::default().to_string(), "?");
}

#[test]
fn readable_frames_are_those_of_the_program_and_its_libraries() {
    let frame = |function: &str, file: &str, module: &str| {
        let known = |text: &str| Some(text.to_owned()).filter(|text| !text.is_empty());
        Frame { function: known(function), file: known(file), line: None, column: None, module: known(module) }
    };
    let frames = [
        frame("core::option::Option<T>::map_or_else", "/rustc/5980/library/core/src/option.rs", "/bin/train"),
        frame("gpumem::source::sim::SimGpu::alloc", "/registry/src/i/gpumem-0.1.0/src/source/sim.rs", "/bin/train"),
        frame("at::native::empty_cuda", "", "/lib/libtorch_cuda.so"),
        frame("cudarc::driver::CudaStream::alloc", "/registry/src/i/cudarc-0.19.10/src/driver.rs", "/bin/train"),
        frame("train::forward", "/home/ada/src/model.rs", "/bin/train"),
        frame("std::rt::lang_start", "/rustc/5980/library/std/src/rt.rs", "/bin/train"),
        frame("main", "", "/bin/train"),
        frame("__libc_start_main_impl", "./csu/../csu/libc-start.c", "/lib/x86_64-linux-gnu/libc.so.6"),
        frame("_start", "", "/bin/train"),
    ];
    let functions: Vec<_> = readable_frames(&frames).iter().filter_map(|frame| frame.function.as_deref()).collect();
    assert_eq!(functions, ["at::native::empty_cuda", "cudarc::driver::CudaStream::alloc", "train::forward"]);
}
