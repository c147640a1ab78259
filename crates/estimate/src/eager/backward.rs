//! The backward graph and the engine that runs it.

use std::{collections::BinaryHeap, mem, rc::Rc};

use super::{BackwardFunction, Edge, Grads, Like, Node, NodeInput, Tape};
use crate::{Eager, Result, Tensor};

impl Eager {
    /// Records an operation, and returns its outputs as tensors that need a gradient.
    pub(crate) fn record<const N: usize>(
        &self,
        inputs: &[&Tensor],
        mut outputs: [Tensor; N],
        function: impl FnOnce(&Self, &[Option<Tensor>]) -> Result<Grads> + 'static,
    ) -> [Tensor; N] {
        let inputs = inputs.iter().map(|input| Some(NodeInput { edge: input.edge?, like: Like::of(input) })).collect();
        let (function, layers): (Option<BackwardFunction>, _) = (Some(Box::new(function)), self.memory.layers());
        let node = Node { function, inputs, outputs: N, parameter: None, layers };
        let node = self.tape.push(node);
        for (at, output) in outputs.iter_mut().enumerate() {
            output.edge = Some(Edge { node, output: at });
        }
        outputs
    }

    /// Returns the output of an operation, recorded if an input needs a gradient. `function` computes the gradients of
    /// the inputs from that of the output.
    pub(crate) fn recorded(
        &self,
        inputs: &[&Tensor],
        output: Tensor,
        function: impl FnOnce(&Self, &Tensor) -> Result<Grads> + 'static,
    ) -> Tensor {
        if !self.needs_grad(inputs) {
            return output;
        }
        let count = inputs.len();
        let [output] = self.record(inputs, [output], move |eager, grads| match grads {
            [Some(grad)] => function(eager, grad),
            _ => Ok(vec![None; count]),
        });
        output
    }

    /// Gives a new tensor its own gradient, which is not kept.
    pub(crate) fn leaf(&self, tensor: Tensor) -> Tensor {
        if !self.grad_enabled.get() {
            return tensor;
        }
        let [tensor] = self.record(&[], [tensor], |_, _| Ok(Vec::new()));
        tensor
    }

    /// Returns the node that accumulates the gradient of a parameter.
    pub(super) fn accumulation(&self, parameter: usize) -> Edge {
        let layers = self.memory.layers();
        let node = Node { function: None, inputs: Vec::new(), outputs: 1, parameter: Some(parameter), layers };
        Edge { node: self.tape.push(node), output: 0 }
    }

    /// Removes the nodes from this one on. Their part of the graph is no longer used.
    pub(super) fn forget_from(&self, first: usize) {
        // The borrow of the tape must end before the saved tensors are freed.
        let removed = self.tape.0.borrow_mut().split_off(first);
        drop(removed);
    }

    /// Runs the backward pass from a loss. A node runs when all gradients of its outputs are available, the latest node
    /// first, as in PyTorch's engine. Gradients of parameters are accumulated as soon as they are available.
    pub(crate) fn backward(&self, loss: &Tensor) -> Result<()> {
        self.in_backward.set(true);
        let result = loss.edge.map_or(Ok(()), |edge| {
            // The gradient of the loss itself. `torch.autograd.backward` holds it until it returns.
            let ones = self.output(&loss.shape, loss.dtype)?;
            self.with_grad(false, || self.run_backward(edge, ones.clone()))
        });
        self.in_backward.set(false);
        self.forget_from(0);
        result
    }

    fn run_backward(&self, root: Edge, gradient: Tensor) -> Result<()> {
        let mut missing = self.tape.dependencies(root.node);
        let mut waiting: Vec<Grads> = vec![Grads::new(); missing.len()];
        let mut ready = BinaryHeap::new();
        let outputs = self.tape.0.borrow()[root.node].outputs;
        let mut first = vec![None; outputs];
        first[root.output] = Some(gradient);
        waiting[root.node] = first;
        ready.push(self.tape.priority(root.node));
        while let Some((_, node)) = ready.pop() {
            let grads = mem::take(&mut waiting[node]);
            let Node { function, inputs, parameter, layers, .. } = self.tape.remove(node);
            self.memory.move_to(&layers);
            if let Some(parameter) = parameter {
                self.accumulate(parameter, grads);
                continue;
            }
            let Some(function) = function else { continue };
            let mut results = function(self, &grads)?;
            for (input, result) in inputs.iter().zip(&mut results) {
                if let (Some(input), Some(grad)) = (input, result.take()) {
                    *result = Some(self.validated(&input.like, grad)?);
                }
            }
            drop(grads);
            self.unpacked.borrow_mut().clear();
            for (input, result) in inputs.iter().zip(results) {
                let Some(NodeInput { edge, .. }) = input else { continue };
                if let Some(result) = result {
                    self.add_to_buffer(&mut waiting, *edge, result)?;
                }
                let missing = &mut missing[edge.node];
                *missing -= 1;
                if *missing == 0 {
                    ready.push(self.tape.priority(edge.node));
                }
            }
        }
        Ok(())
    }

    /// Returns a gradient with the shape and type of its input: broadcast dimensions are summed, and a different type
    /// is converted.
    fn validated(&self, input: &Like, grad: Tensor) -> Result<Tensor> {
        let grad = if grad.shape.elements() == input.shape.elements() {
            grad
        } else {
            let sum = self.empty(&input.shape, grad.dtype, input.class())?;
            self.sum_buffer(&grad, &input.shape)?;
            sum
        };
        if grad.dtype == input.dtype { Ok(grad) } else { self.empty(&grad.shape, input.dtype, input.class()) }
    }

    /// Adds a gradient to those from other uses of the same tensor, in place if nothing else uses the earlier sum.
    fn add_to_buffer(&self, waiting: &mut [Grads], edge: Edge, grad: Tensor) -> Result<()> {
        let outputs = self.tape.0.borrow()[edge.node].outputs;
        let grads = &mut waiting[edge.node];
        grads.resize(outputs, None);
        let slot = &mut grads[edge.output];
        *slot = Some(match slot.take() {
            None => grad,
            Some(sum) if sum.is_sole() => sum,
            Some(sum) => self.output(&sum.shape, sum.dtype)?,
        });
        Ok(())
    }
}

impl Tape {
    fn push(&self, node: Node) -> usize {
        let mut nodes = self.0.borrow_mut();
        nodes.push(node);
        nodes.len() - 1
    }

    /// Takes the function and the inputs of a node. The tensors that the function saved are freed with it.
    fn remove(&self, node: usize) -> Node {
        let node = &mut self.0.borrow_mut()[node];
        let (function, inputs) = (node.function.take(), mem::take(&mut node.inputs));
        Node { function, inputs, layers: Rc::clone(&node.layers), ..*node }
    }

    /// Returns the order of a node: nodes that accumulate gradients come first, then later ones before earlier ones.
    fn priority(&self, node: usize) -> (usize, usize) {
        let accumulates = self.0.borrow()[node].parameter.is_some();
        (if accumulates { usize::MAX } else { node }, node)
    }

    /// Returns the number of gradients that each node waits for.
    fn dependencies(&self, root: usize) -> Vec<usize> {
        let nodes = self.0.borrow();
        let mut counts = vec![0; nodes.len()];
        let mut is_known = vec![false; nodes.len()];
        let mut next = vec![root];
        is_known[root] = true;
        while let Some(node) = next.pop() {
            for NodeInput { edge, .. } in nodes[node].inputs.iter().flatten() {
                counts[edge.node] += 1;
                if !mem::replace(&mut is_known[edge.node], true) {
                    next.push(edge.node);
                }
            }
        }
        counts
    }
}
