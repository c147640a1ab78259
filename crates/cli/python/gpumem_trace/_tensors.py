"""PyTorch's tensors: what they are, and how much memory each takes."""

import collections
import gc
import sys
import types

from ._library import Error

_MIB = 2**20
# What a module keeps for itself. The rest of its attributes may refer to more tensors.
_OF_MODULES = {"_parameters", "_buffers", "_modules"}
# How far objects of unknown classes are searched.
_DEPTH = 4
_PARTS = {
    "sparse_coo": ["_indices", "_values"],
    "sparse_csr": ["crow_indices", "col_indices", "values"],
    "sparse_bsr": ["crow_indices", "col_indices", "values"],
    "sparse_csc": ["ccol_indices", "row_indices", "values"],
    "sparse_bsc": ["ccol_indices", "row_indices", "values"],
}


class Tensors:
    """The memory of PyTorch's tensors, from `tensors`.

    `rows` has a dict for each storage, those of GPUs first and the largest first: `name`, `kind` ("parameter", "gradient", "buffer",
    "optimizer state" or "other"), `device`, `bytes`, `shape`, `dtype`, and `shared`: the names of other tensors in the same storage. `bytes` is
    that of the storage, which may be larger than the tensor, and None if it cannot be read. `totals` has the sums: `totals["cuda:0"]["gradient"]`.
    `allocated` is what PyTorch has in use on each GPU. It can be more than the sum, because Python does not know each tensor: not those that are
    only kept for the backward pass.
    """

    def __init__(self, rows, allocated):
        self.rows = sorted(rows, key=lambda row: (row["device"] == "cpu", -(row["bytes"] or 0)))
        self.allocated, self.totals = allocated, {}
        for row in self.rows:
            of_device = self.totals.setdefault(row["device"], collections.Counter())
            if row["bytes"]:
                of_device[row["kind"]] += row["bytes"]

    def frame(self):
        """Returns the rows as a DataFrame of pandas."""
        import pandas

        return pandas.DataFrame(self.rows, columns=["name", "kind", "device", "bytes", "shape", "dtype", "shared"])

    def text(self, most=20):
        """Returns the largest rows as a table in MB, with a line of the sums."""
        lines = [f"{'MB':>10}  {'device':<7} {'kind':<16} tensor"]
        for row in self.rows[:most]:
            size = "?" if row["bytes"] is None else f"{row['bytes'] / _MIB:,.2f}"
            shared = f", shared with {_listed(row['shared'])}" if row["shared"] else ""
            shape = f" {row['shape']}" if row["shape"] is not None else ""
            lines.append(f"{size:>10}  {row['device']:<7} {row['kind']:<16} {row['name']}{shape} {row['dtype']}{shared}")
        rest = self.rows[most:]
        if rest:
            lines.append(f"{sum(row['bytes'] or 0 for row in rest) / _MIB:10,.2f}  in {len(rest):,} more")
        sums = []
        for device, kinds in self.totals.items():
            parts = ", ".join(f"{kind} {size / _MIB:,.2f}" for kind, size in kinds.most_common()) or "nothing that can be read"
            allocated = self.allocated.get(device)
            of = f" of {allocated / _MIB:,.2f} that PyTorch has in use" if allocated is not None else ""
            sums.append(f"{sum(kinds.values()) / _MIB:,.2f}{of} on {device} ({parts})")
        unknown = sum(row["bytes"] is None for row in self.rows)
        if unknown:
            sums.append(f"without {unknown:,} whose size cannot be read")
        lines.append(f"total: {'; '.join(sums) or 'no tensors'}")
        return "\n".join(lines)

    def __str__(self):
        return self.text()

    __repr__ = __str__


def _listed(names, most=3):
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def tensors(*things):
    """Lists PyTorch's tensors: those of models, optimizers, or anything that contains tensors, and all others that are alive.

        print(gpumem_trace.tensors(model, optimizer))

    Tensors that share storage are one row. Other models and optimizers are found, too, and their names start with their class. The result
    keeps no tensor alive, and no GPU is waited for.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        raise Error("there are no tensors, because the program has not imported PyTorch; call tensors after `import torch`")
    search = _Search(torch)
    # The classes of tensors may change what their methods do.
    with torch._C.DisableTorchFunctionSubclass():
        for thing in things:
            search.gather(thing, "")
        search.add_modules()
        search.add_all_others()
    allocated = {}
    for device in {row["device"] for row in search.rows.values() if row["device"].startswith("cuda")}:
        allocated[device] = torch.cuda.memory_allocated(device)
    return Tensors(search.rows.values(), allocated)


class _Search:
    def __init__(self, torch):
        self.torch = torch
        # The rows by storage, and the tensors by their number, which Python does not use again while they are here.
        self.rows, self.tensors = {}, {}
        # Tensors whose names are complete, and names of parameters.
        self.done, self.names = set(), {}
        self.visited, self.modules, self.optimizers, self.others = {}, [], [], []

    def gather(self, thing, name, depth=_DEPTH):
        """Finds models, optimizers and tensors in something."""
        # `isinstance` would ask the object for its class, and a proxy may then import or create something.
        is_a = type(thing).__mro__.__contains__
        if id(thing) in self.visited or thing is None or is_a(str) or is_a(type) or is_a(types.ModuleType):
            return
        self.visited[id(thing)] = thing
        if is_a(self.torch.Tensor):
            self.others.append((thing, name))
        elif is_a(self.torch.nn.Module):
            self.modules.append((thing, name))
        elif is_a(self.torch.optim.Optimizer):
            self.optimizers.append((thing, name))
        elif depth == 0:
            return
        elif is_a(dict):
            for key, value in list(thing.items()):
                self.gather(value, _joined(name, key), depth - 1)
        elif is_a(list) or is_a(tuple) or is_a(set) or is_a(frozenset) or is_a(collections.deque):
            for at, value in enumerate(list(thing)):
                self.gather(value, _joined(name, at), depth - 1)
        else:
            try:
                # Not that of a class which computes its attributes.
                self.gather(object.__getattribute__(thing, "__dict__"), name, depth)
            except AttributeError:
                pass

    def add_modules(self):
        for module, name in self.modules:
            self.add_module(module, name)
        self.done.update(self.tensors)

    def add_module(self, module, path):
        self.visited[id(module)] = module
        for name, parameter in getattr(module, "_parameters", {}).items():
            self.add(parameter, "parameter", _joined(path, name))
        for name, buffer in getattr(module, "_buffers", {}).items():
            self.add(buffer, "buffer", _joined(path, name))
        for name, child in getattr(module, "_modules", {}).items():
            if child is not None:
                self.add_module(child, _joined(path, name))
        for name, value in list(vars(module).items()):
            if name not in _OF_MODULES:
                self.gather(value, _joined(path, name), depth=2)

    def add_optimizer(self, optimizer, prefix):
        states = getattr(optimizer, "state", {})
        for at, group in enumerate(getattr(optimizer, "param_groups", [])):
            for number, parameter in enumerate(group["params"]):
                name = self.names.get(id(parameter)) or _joined(prefix, f"param_groups.{at}.{number}")
                self.add(parameter, "parameter", name)
                for key, value in _flat(states.get(parameter, {})):
                    self.add(value, "optimizer state", f"{name}.{key}")

    def add_all_others(self):
        found, modules, optimizers = [], {}, []
        for thing in gc.get_objects():
            is_a = type(thing).__mro__.__contains__
            if is_a(self.torch.Tensor):
                found.append(thing)
            elif is_a(self.torch.nn.Module) and id(thing) not in self.visited:
                modules[id(thing)] = thing
            elif is_a(self.torch.optim.Optimizer) and id(thing) not in self.visited:
                optimizers.append(thing)
        inner = {id(child) for module in modules.values() for child in getattr(module, "_modules", {}).values()}
        self.modules = [(module, type(module).__name__) for key, module in modules.items() if key not in inner]
        self.add_modules()
        # The states of optimizers have the names of the parameters.
        for optimizer, name in self.optimizers + [(optimizer, type(optimizer).__name__) for optimizer in optimizers]:
            self.add_optimizer(optimizer, name)
        for tensor, name in self.others:
            self.add(tensor, self.kind(tensor), name or type(tensor).__name__)
        self.done.update(self.tensors)
        for tensor in found:
            self.add_gradient(tensor, type(tensor).__name__)
        self.done.update(self.tensors)
        for tensor in found:
            self.add(tensor, self.kind(tensor), type(tensor).__name__)

    def kind(self, tensor):
        return "parameter" if isinstance(tensor, self.torch.nn.Parameter) else "other"

    def add(self, tensor, kind, name):
        if not isinstance(tensor, self.torch.Tensor) or id(tensor) in self.done:
            return
        self.tensors[id(tensor)] = tensor
        if kind == "parameter":
            self.names.setdefault(id(tensor), name)
        try:
            storages = self.storages(tensor)
        except Exception:
            storages = [(("unknown", id(tensor)), str(tensor.device), None)]
        for key, device, size in storages:
            if device == "meta" or size == 0:
                continue
            row = self.rows.get(key)
            if row is None:
                row = {"name": name, "kind": kind, "device": device, "bytes": size, "shape": _shape(tensor)}
                row.update(dtype=str(tensor.dtype).replace("torch.", ""), shared=[])
                self.rows[key] = row
            elif name != row["name"] and name not in row["shared"]:
                row["shared"].append(name)
        self.add_gradient(tensor, name)

    def add_gradient(self, tensor, name):
        # PyTorch warns when it is asked for the gradients that it does not keep.
        if tensor.is_leaf or tensor.retains_grad:
            self.add(tensor.grad, "gradient", f"{name}.grad")

    def storages(self, tensor):
        """Returns the number, the device and the size of each storage of a tensor."""
        if hasattr(type(tensor), "__tensor_flatten__"):
            # It consists of other tensors, as the part of a distributed one does.
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        else:
            parts = [getattr(tensor, name)() for name in _PARTS.get(str(tensor.layout).replace("torch.", ""), [])]
        if parts:
            return [storage for part in parts for storage in self.storages(part)]
        # `data_ptr` may copy the storage.
        storage = tensor.untyped_storage()
        return [(storage._cdata, str(storage.device), storage.nbytes())]


def _shape(tensor):
    try:
        return tuple(tensor.shape)
    except Exception:
        # A nested tensor has several.
        return None


def _joined(prefix, name):
    return f"{prefix}.{name}" if prefix else str(name)


def _flat(value, name=""):
    """Returns what is in the state of a parameter, which may contain lists."""
    if isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [found for key, inner in items for found in _flat(inner, _joined(name, key))]
    return [(name, value)]
