//! The functions of a stack that say what memory is for.

use super::{
    library, readable_frames,
    tables::{DRIVER, WRAPPERS},
};
use crate::model::Frame;

/// One part of a stack, as a reader needs it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call<'a> {
    /// A function.
    Function(&'a Frame),
    /// All functions of a library.
    Library(&'a str),
    /// An operation of PyTorch's backward pass, such as `LogSoftmaxBackward0`.
    Backward(&'a str),
    /// PyTorch's backward pass, on a thread of its own: the functions further inside are called by it.
    BackwardPass,
}

/// The functions that say what allocated, the innermost first: [`readable_frames`] without those that only pass a call on, such as
/// decorators. Where there are lines of Python, functions of other languages are left out. Elsewhere the innermost functions of a library
/// are one part.
pub fn calls(frames: &[Frame]) -> Vec<Call<'_>> {
    let readable = readable_frames(frames);
    let is_backward = |frame: &&Frame| frame.function.as_deref().is_some_and(|name| name.starts_with(ENGINE));
    let has_backward = readable.iter().any(is_backward);
    let has_python = frames.iter().any(Frame::is_python);
    let mut calls = Vec::new();
    if has_python {
        let functions = readable.into_iter().filter(|frame| frame.is_python() && !frame.passes_on());
        calls.extend(functions.map(Call::Function));
    } else if let Some(operation) = backward_operation(frames) {
        calls.push(Call::Backward(operation));
    } else {
        let is_inside = |frame: &&&Frame| frame.is_in_library() || frame.is_in(DRIVER) || frame.is_in_static_runtime();
        let (inside, outside) = readable.split_at(readable.iter().take_while(is_inside).count());
        let has_library = inside.iter().any(|frame| frame.is_in_library());
        calls.extend(library(frames).filter(|_| has_library).map(Call::Library));
        // The functions around an operation of the backward pass are PyTorch's.
        let outside = outside.iter().filter(|frame| !(has_backward && frame.is_in_library()));
        calls.extend(outside.map(|frame| Call::Function(frame)));
    }
    if has_backward {
        calls.push(Call::BackwardPass);
    }
    calls
}

/// The loop of the threads on which PyTorch runs the backward pass.
const ENGINE: &str = "torch::autograd::Engine::thread_main(";

/// The innermost operation of PyTorch's backward pass: `LogSoftmaxBackward0` for
/// `torch::autograd::generated::LogSoftmaxBackward0::apply(…)`.
pub(crate) fn backward_operation(frames: &[Frame]) -> Option<&str> {
    frames.iter().find_map(|frame| {
        let name = frame.function.as_deref()?.strip_prefix("torch::autograd::")?;
        let operation = name.strip_prefix("generated::").unwrap_or(name).split_once("::apply(")?.0;
        (!operation.contains(':')).then_some(operation)
    })
}

impl Frame {
    /// A function of Python that says nothing of what the memory is for: it passes the call on.
    fn passes_on(&self) -> bool {
        let function = self.function.as_deref().unwrap_or_default();
        let file = self.file.as_deref().unwrap_or_default();
        // A function inside of a function is a decorator's.
        let is_inner = self.is_of_python_package() && function.contains(".<locals>.");
        is_inner || WRAPPERS.iter().any(|(folder, name)| file.contains(folder) && function == *name)
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
            Call::BackwardPass => "<backward pass>".to_owned(),
        };
        calls(frames).iter().map(name).collect()
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
        assert_eq!(names(&frames), ["<MmBackward0>", "<backward pass>"]);
        let accumulate = torch("torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)");
        assert_eq!(names(&[accumulate, engine.clone()]), ["<AccumulateGrad>", "<backward pass>"]);
        let own = [python("Square.backward", "/app/ops.py"), torch("torch::autograd::PyNode::apply()"), engine];
        assert_eq!(names(&own), ["Square.backward", "<backward pass>"]);
        let between = [torch("at::add()"), torch("torch::autograd::accumulate()"), own[2].clone()];
        assert_eq!(names(&between), ["<PyTorch>", "<backward pass>"]);
    }
}
