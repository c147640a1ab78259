# Runs after `torch.py`, with `--modules`: tells PyTorch's allocator which module allocates, and notes which tensors are weights,
# gradients and states of optimizers. It changes no argument and no result of the program.

import threading
import time
import weakref

# What the modules of the program are called, by their `id`: a weak reference, and the path and the type.
names = {}
# The modules that parameters belong to, by the `id` of the parameter.
paths = {}
# The modules that each thread is in.
here = threading.local()
# Which tensors were something at some times: `[times, tensors]`. A tensor is `(class, device, address, path)`.
marks = []
# The newest mark of each owner.
newest = {}
# All marks together have at most so many tensors, and each has at most so many times.
MOST_MARKED = 300_000
MOST_TIMES = 50_000
marked = 0
is_observing = False
# So many modules have names at a time.
MOST_NAMES = 100_000


def observe_modules(torch):
    """Called when PyTorch has initialised CUDA. Returns why it cannot be done."""
    global is_observing
    tell = getattr(torch._C, "_cuda_setMemoryMetadata", None)
    if tell is None:
        return "it is older than 2.10"
    if is_observing:
        return None
    is_observing = True
    is_compiling = torch.compiler.is_compiling

    def enter(module, inputs):
        # torch.compile reads this function too, and must find nothing in it.
        if is_compiling():
            return
        try:
            stack = here.__dict__.setdefault("stack", [])
            known = names.get(id(module))
            if known is None or known[0]() is not module:
                known = name_modules(torch, module, stack)
            # A layer that a checkpoint runs again is not below another module.
            if "." not in known[1]:
                found = [("inputs", *place(tensor), known[1]) for tensor in inputs if is_on_device(torch, tensor)]
                mark(id(module), found)
            stack.append(known)
            tell(known[1])
        except Exception:
            pass

    def leave(module, inputs, output):
        if is_compiling():
            return
        try:
            stack = here.stack
            # A module that raised may have been left without a call of this function.
            while stack.pop()[0]() is not module:
                pass
            tell(stack[-1][1] if stack else "")
        except Exception:
            tell("")

    def stepped(optimizer, arguments, keywords):
        try:
            mark_optimizer(torch, optimizer)
        except Exception:
            pass

    modules = sys.modules["torch.nn.modules.module"]
    modules.register_module_forward_pre_hook(enter)
    modules.register_module_forward_hook(leave, always_call=True)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(stepped)


def is_on_device(torch, tensor):
    return isinstance(tensor, torch.Tensor) and tensor.is_cuda


def place(tensor):
    return tensor.device.index, tensor.data_ptr()


def name_modules(torch, module, stack):
    """Names a module that nobody has named, and those in it."""
    if len(names) > MOST_NAMES:
        names.clear()
        paths.clear()
    top = type(module).__name__
    if stack:
        top = stack[-1][1].split(": ")[0] + "." + top
    found = []
    for name, part in module.named_modules(prefix=top):
        path = name if name == top else "%s: %s" % (name, type(part).__name__)
        names[id(part)] = weakref.ref(part), path
        for tensor in [*part._parameters.values(), *part._buffers.values()]:
            if tensor is not None:
                paths[id(tensor)] = path
                if is_on_device(torch, tensor):
                    found.append(("weights", *place(tensor), path))
    # The inputs of a module have the module itself as owner.
    mark((id(module), "weights"), found)
    return names[id(module)]


def mark_optimizer(torch, optimizer):
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            path = paths.get(id(parameter), "")
            state = optimizer.state.get(parameter)
            tensors = [("weights", parameter), ("gradients", parameter.grad)]
            if state:
                tensors += [("optimizer", value) for value in state.values()]
            found += [(name, *place(tensor), path) for name, tensor in tensors if is_on_device(torch, tensor)]
    mark(id(optimizer), found)


def mark(owner, found):
    """`found` is there now."""
    global marked
    if not found:
        return
    now = time.time_ns() // 1000
    known = newest.get(owner)
    if known is not None and known[1] == found:
        known[0].append(now)
    else:
        newest[owner] = known = [[now], found]
        marks.append(known)
        marked += len(found)
    # The first ones stay: a program often needs most in its first steps.
    if len(known[0]) > MOST_TIMES:
        del known[0][1000 : MOST_TIMES // 2]
    while marked > MOST_MARKED and len(marks) > 20:
        dropped = marks.pop(10)
        marked -= len(dropped[1])
        for owner in [owner for owner, known in newest.items() if known is dropped]:
            del newest[owner]
