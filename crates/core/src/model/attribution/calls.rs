//! Finds the functions of a stack that show what memory is for.

use super::{
    library,
    phase::Phase,
    readable_frames,
    tables::{CALLED_LIBRARIES, DECORATED, DRIVER, PHASES, WRAPPERS},
};
use crate::model::Frame;

/// One part of a stack in reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call<'a> {
    /// A function.
    Function(&'a Frame),
    /// All functions of a library.
    Library(&'a str),
    /// An operation of PyTorch's backward pass, such as `LogSoftmaxBackward0`.
    Backward(&'a str),
    /// The phase in which the inner functions are called.
    Phase(Phase),
}

/// Returns the innermost operation of PyTorch: `nonzero` for `at::_ops::nonzero::call(…)`.
pub fn torch_operation(frames: &[Frame]) -> Option<&str> {
    frames.iter().find_map(|frame| {
        let (operation, called) = frame.function.as_deref()?.strip_prefix("at::_ops::")?.split_once("::")?;
        ["call(", "redispatch("].iter().any(|part| called.starts_with(part)).then_some(operation)
    })
}

/// Returns the functions that show what allocated, the innermost first: [`readable_frames`] without those that only pass a call
/// on, such as decorators. If the stack has Python frames, functions of other languages are left out, except that a library
/// called by a framework, such as cuBLAS, becomes one part. Otherwise the innermost functions of any library become one part.
pub fn calls(frames: &[Frame]) -> Vec<Call<'_>> {
    let readable = readable_frames(frames);
    let is_backward = |frame: &&Frame| frame.function.as_deref().is_some_and(|name| name.starts_with(ENGINE));
    let has_backward = readable.iter().any(is_backward);
    let native = &frames[..frames.iter().position(Frame::is_python).unwrap_or(frames.len())];
    let has_python = native.len() < frames.len();
    let mut calls = Vec::new();
    let operation = backward_operation(native);
    if has_python || operation.is_some() {
        let is_called = |name: &&str| CALLED_LIBRARIES.iter().any(|(_, known)| known == name);
        calls.extend(library(native).filter(is_called).map(Call::Library));
        calls.extend(operation.map(Call::Backward));
    } else {
        let is_inside = |frame: &&&Frame| frame.is_in_library() || frame.is_in(DRIVER) || frame.is_of_toolkit();
        let (inside, outside) = readable.split_at(readable.iter().take_while(is_inside).count());
        let has_library = inside.iter().any(|frame| frame.is_in_library());
        calls.extend(library(frames).filter(|_| has_library).map(Call::Library));
        // The functions around an operation of the backward pass are PyTorch's.
        let outside = outside.iter().filter(|frame| !(has_backward && frame.is_in_library()));
        calls.extend(outside.map(|frame| Call::Function(frame)));
    }
    let engine = has_backward.then_some(Call::Phase(Phase::BackwardPass));
    let python = readable.into_iter().filter(|frame| has_python && frame.is_python()).filter_map(|frame| {
        let phase = frame.phase().map(Call::Phase);
        phase.or_else(|| (!frame.passes_on()).then_some(Call::Function(frame)))
    });
    for call in python.chain(engine) {
        // A checkpoint runs its own backward pass after the recomputation. That pass is part of the outer one.
        let is_known = matches!(call, Call::Phase(_))
            && calls.iter().any(|inside| *inside == call || *inside == Call::Phase(Phase::BackwardPass));
        if !is_known {
            calls.push(call);
        }
    }
    calls
}

/// Returns the innermost phase of a stack.
pub(crate) fn phase(frames: &[Frame]) -> Option<Phase> {
    frames.iter().find_map(Frame::phase)
}

/// The loop of the threads on which PyTorch runs the backward pass.
const ENGINE: &str = "torch::autograd::Engine::thread_main(";

/// Returns the innermost operation of PyTorch's backward pass: `LogSoftmaxBackward0` for
/// `torch::autograd::generated::LogSoftmaxBackward0::apply(…)`.
pub(crate) fn backward_operation(frames: &[Frame]) -> Option<&str> {
    frames.iter().find_map(|frame| {
        let name = frame.function.as_deref()?.strip_prefix("torch::autograd::")?;
        let operation = name.strip_prefix("generated::").unwrap_or(name).split_once("::apply(")?.0;
        (!operation.contains(':')).then_some(operation)
    })
}

impl Frame {
    fn phase(&self) -> Option<Phase> {
        let (file, function) = (self.file.as_deref()?, self.function.as_deref()?);
        let last = function.rsplit('.').next().unwrap_or(function);
        let mut phases =
            PHASES.iter().filter(|(folder, name, _)| [function, last].contains(name) && file.contains(folder));
        phases.next().map(|(.., phase)| *phase)
    }

    /// Returns whether this is a Python function that only passes the call on and therefore tells nothing about the use of the
    /// memory.
    fn passes_on(&self) -> bool {
        let function = self.function.as_deref().unwrap_or_default();
        let file = self.file.as_deref().unwrap_or_default();
        // A function inside another function belongs to a decorator.
        let is_inner =
            self.is_of_python_package() && (function.contains(".<locals>.") || DECORATED.contains(&function));
        let is_called = |name: &str| name == function || name.rsplit('.').next() == Some(function);
        is_inner || WRAPPERS.iter().any(|(folder, name)| file.contains(folder) && is_called(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn python(function: &str, file: &str) -> Frame {
        Frame { function: Some(function.to_owned()), file: Some(file.to_owned()), line: Some(1), ..Frame::default() }
    }

    fn torch(function: &str) -> Frame {
        let module = Some("/site-packages/torch/lib/libtorch_cpu.so".to_owned());
        Frame { function: Some(function.to_owned()), module, ..Frame::default() }
    }

    fn names(frames: &[Frame]) -> Vec<String> {
        let name = |call: &Call<'_>| match call {
            Call::Function(frame) => frame.function.clone().expect("it has one"),
            Call::Library(name) | Call::Backward(name) => format!("<{name}>"),
            Call::Phase(phase) => phase.in_brackets().to_owned(),
        };
        calls(frames).iter().map(name).collect()
    }

    #[test]
    fn the_innermost_operation_of_pytorch_is_found() {
        let frames = [
            torch("at::native::nonzero_cuda(at::Tensor const&)"),
            torch("at::_ops::nonzero::call(at::Tensor const&)"),
            torch("at::_ops::index_Tensor::redispatch(c10::DispatchKeySet, at::Tensor const&)"),
        ];
        assert_eq!(torch_operation(&frames), Some("nonzero"));
        assert_eq!(torch_operation(&frames[2..]), Some("index_Tensor"));
        let others = ["at::_ops::nonzero", "at::_ops::nonzero::schema_str()", "my::at::_ops::add::call()"].map(torch);
        assert_eq!(torch_operation(&others), None);
    }

    #[test]
    fn functions_that_pass_a_call_on_are_left_out() {
        let packages = "/venv/lib/python3.12/site-packages";
        let module = format!("{packages}/torch/nn/modules/module.py");
        let generic = format!("{packages}/transformers/utils/generic.py");
        let frames = [
            torch("at::_ops::linear::call(at::Tensor const&)"),
            python("Linear.forward", &format!("{packages}/torch/nn/modules/linear.py")),
            python("Module._call_impl", &module),
            python("Module._wrapped_call_impl", &module),
            python("can_return_tuple.<locals>.wrapper", &generic),
            // The program's own functions are never left out.
            python("main.<locals>.step", "/app/train.py"),
            python("Module._call_impl", "/app/train.py"),
        ];
        assert_eq!(names(&frames), ["Linear.forward", "main.<locals>.step", "Module._call_impl"]);
        // The names in PyTorch's history.
        let frames = [
            python("forward", &format!("{packages}/torch/nn/modules/linear.py")),
            python("inner", &module),
            python("_call_impl", &module),
            python("wrapper", &generic),
            python("wrapper", "/app/train.py"),
        ];
        assert_eq!(names(&frames), ["forward", "wrapper"]);
        let own =
            Frame { function: Some("my_op()".to_owned()), module: Some("/app/train".to_owned()), ..Frame::default() };
        assert_eq!(names(&[torch("at::_ops::linear::call()"), torch("at::linear()"), own]), ["<PyTorch>", "my_op()"]);
    }

    #[test]
    fn the_backward_pass_has_the_name_of_its_operation() {
        let engine = torch("torch::autograd::Engine::thread_main(std::shared_ptr<torch::autograd::GraphTask> const&)");
        let apply = torch("torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)");
        let node = torch("torch::autograd::Node::operator()(std::vector<at::Tensor>&&)");
        let frames = [torch("at::mm()"), apply, node, engine.clone()];
        assert_eq!(names(&frames), ["<MmBackward0>", " (backward pass)"]);
        let accumulate = torch("torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)");
        assert_eq!(names(&[accumulate, engine.clone()]), ["<AccumulateGrad>", " (backward pass)"]);
        let own = [python("Square.backward", "/app/ops.py"), torch("torch::autograd::PyNode::apply()"), engine];
        assert_eq!(names(&own), ["Square.backward", " (backward pass)"]);
        let between = [torch("at::add()"), torch("torch::autograd::accumulate()"), own[2].clone()];
        assert_eq!(names(&between), ["<PyTorch>", " (backward pass)"]);
    }

    /// PyTorch 2.11 calls functions on its threads like this: the engine is outside the recorded part of a stack with Python
    /// lines.
    #[test]
    fn python_on_threads_of_pytorch_is_in_a_phase() {
        let packages = "/venv/lib/python3.12/site-packages";
        let of_torch = |function: &str, file: &str| python(function, &format!("{packages}/torch/{file}"));
        let apply = of_torch("BackwardCFunction.apply", "autograd/function.py");
        let forward = python("Block.forward", "/app/model.py");
        let check = |frames: &[Frame], expected: &[&str], expected_phase| {
            assert_eq!(names(frames), expected);
            assert_eq!(phase(frames), expected_phase);
        };
        let custom = [python("Square.backward", "/app/ops.py"), apply.clone()];
        check(&custom, &["Square.backward", " (backward pass)"], Some(Phase::BackwardPass));
        let reentrant = of_torch("CheckpointFunction.backward", "utils/checkpoint.py");
        let recomputed = ["Block.forward", " (recomputed for a checkpoint)", " (backward pass)"];
        check(&[forward.clone(), reentrant.clone(), apply.clone()], &recomputed, Some(Phase::Recomputation));
        let recompute = "_checkpoint_without_reentrant_generator.<locals>.recompute_fn";
        let frames = [
            forward.clone(),
            of_torch(recompute, "utils/checkpoint.py"),
            of_torch("DisableContext.__call__.<locals>._fn", "_dynamo/eval_frame.py"),
            of_torch("_run_fn_with_dynamo_disabled", "utils/checkpoint.py"),
            of_torch("_checkpoint_hook.__init__.<locals>.unpack_hook", "utils/checkpoint.py"),
        ];
        check(&frames, &recomputed, Some(Phase::Recomputation));
        // After the recomputation, such a checkpoint runs its part of the backward pass on the same thread.
        let frames = [
            torch("at::mm()"),
            torch("torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)"),
            of_torch("_engine_run_backward", "autograd/graph.py"),
            reentrant,
            apply,
        ];
        check(&frames, &["<MmBackward0>", " (backward pass)"], Some(Phase::BackwardPass));
        let frames = [
            of_torch("pin_memory", "utils/data/_utils/pin_memory.py"),
            of_torch("_pin_memory_loop.<locals>.do_one_step", "utils/data/_utils/pin_memory.py"),
            of_torch("_pin_memory_loop", "utils/data/_utils/pin_memory.py"),
            python("Thread.run", "/usr/lib/python3.12/threading.py"),
            python("Thread._bootstrap_inner", "/usr/lib/python3.12/threading.py"),
            python("Thread._bootstrap", "/usr/lib/python3.12/threading.py"),
        ];
        check(&frames, &["pin_memory", " (pin thread of a DataLoader)"], Some(Phase::PinThread));
        check(&[forward], &["Block.forward"], None);
    }

    #[test]
    fn a_library_that_pytorch_calls_is_inside_of_the_line() {
        let nccl = Frame { module: Some("/lib/libnccl.so.2".to_owned()), ..Frame::default() };
        let of_torch = |function: &str, file: &str| {
            python(function, &format!("/venv/lib/python3.12/site-packages/torch/distributed/{file}"))
        };
        let wrapper = of_torch("_exception_logger.<locals>.wrapper", "c10d_logger.py");
        let group = |function: &str| of_torch(function, "distributed_c10d.py");
        let line = python("main", "/app/train.py");
        let connect = torch("c10d::ProcessGroupNCCL::eagerConnectSingleDevice(c10::Device)");
        let helper = group("_new_process_group_helper");
        let eager = [nccl.clone(), connect, helper, group("init_process_group"), wrapper.clone(), line.clone()];
        assert_eq!(names(&eager), ["<NCCL>", "init_process_group", "main"]);
        let first = [nccl.clone(), torch("c10d::ProcessGroupNCCL::initNCCLComm()"), group("all_reduce"), wrapper, line];
        assert_eq!(names(&first), ["<NCCL>", "all_reduce", "main"]);
        // A thread of NCCL has no lines.
        assert_eq!(names(&[nccl.clone(), nccl]), ["<NCCL>"]);
    }
}
