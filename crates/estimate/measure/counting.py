"""Counts the bytes of PyTorch's tensors on a CPU."""

import gc
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Bytes(TorchDispatchMode):
    """Each storage counts from the operation that makes it until it is freed. The counters of steps of `torch.optim`, four bytes for each
    parameter, are on the CPU in real steps as well and are not counted."""

    def __init__(self, known):
        super().__init__()
        self.live, self.now, self.peak = {}, 0, 0
        for tensor in known:
            self.add(tensor)

    def set(self, storage, size):
        key = storage._cdata
        if key not in self.live:
            weakref.finalize(storage, self.set_key, key, None)
        self.set_key(key, size)

    def set_key(self, key, size):
        self.now -= self.live.pop(key, 0)
        if size is not None:
            self.live[key] = size
            self.now += size
            self.peak = max(self.peak, self.now)

    def add(self, tensor):
        if isinstance(tensor, torch.Tensor) and type(tensor).__name__ != "DTensor":
            storage = tensor.untyped_storage()
            if storage._cdata not in self.live:
                self.set(storage, storage.nbytes())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            # The counters of steps.
            if not (isinstance(tensor, torch.Tensor) and tensor.dim() == 0 and function is torch.ops.aten._to_copy.default):
                self.add(tensor)
        return result

    def highest(self, run):
        """Returns the highest value while a function runs, and its result."""
        gc.collect()
        self.peak = self.now
        with self:
            result = run()
        return self.peak, result
