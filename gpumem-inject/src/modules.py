# Runs after `torch.py`, with `--modules`: tells PyTorch's allocator which module allocates, and notes which tensors are weights,
# gradients and states of optimizers. It changes no argument and no result of the program.

import threading
import time
import warnings
import weakref

# The names of the program's modules, by their `id`: a weak reference, and the path and the type.
names = {}
# The modules that parameters belong to, by the `id` of the parameter.
paths = {}
# The modules that each thread is in.
here = threading.local()
# The tensors that had a class at some times: `[times, tensors]`. A tensor is `(class, device, address, path)`.
marks = []
# The newest mark of each owner.
newest = {}
# All marks together have at most this many tensors, and each has at most this many times.
MOST_MARKED = 300_000
MOST_TIMES = 50_000
marked = 0
is_observing = False
# At most this many modules have names at a time.
MOST_NAMES = 100_000


def observe_modules(torch):
    """Called when PyTorch has initialised CUDA. Returns the reason if it fails."""
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
                # A module may refuse to list its parts. `leave` looks for it in the stack all the same.
                known = weakref.ref(module), stack[-1][1] if stack else ""
                try:
                    known = name_modules(torch, module, stack)
                except Exception:
                    pass
            stack.append(known)
            tell(known[1])
            # A layer that a checkpoint runs again is not below another module.
            if "." not in known[1]:
                mark(id(module), places(torch, "inputs", inputs, known[1]))
        except Exception:
            pass

    def leave(module, inputs, *others):
        if is_compiling():
            return
        try:
            stack = here.stack
            # A module that raised may have been left without a call of this function.
            left = stack.pop()
            while left[0]() is not module:
                left = stack.pop()
            tell(stack[-1][1] if stack else "")
            # PyTorch gives keyword arguments to this function only, and not if the module raised.
            if len(others) == 2 and "." not in left[1]:
                mark((id(module), "keywords"), places(torch, "inputs", others[0].values(), left[1]))
        except Exception:
            tell("")

    def stepped(optimizer, arguments, keywords):
        try:
            mark_optimizer(torch, optimizer)
        except Exception:
            pass

    # PyTorch would warn of hooks that are not the program's.
    warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
    modules = sys.modules["torch.nn.modules.module"]
    modules.register_module_forward_pre_hook(enter)
    modules.register_module_forward_hook(leave, with_kwargs=True, always_call=True)
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(stepped)


def places(torch, name, tensors, path):
    """Returns the tensors on a device, as a mark has them."""
    found = []
    for tensor in tensors:
        # Tensors of torch.compile and torch.export have no memory, and PyTorch warns when their addresses are read.
        if type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
            continue
        try:
            # This is a rank's part of a distributed tensor.
            tensor = getattr(tensor, "_local_tensor", tensor)
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda and tensor.data_ptr():
                found.append((name, tensor.device.index, tensor.data_ptr(), path))
        except Exception:
            # The tensor has no memory.
            pass
    return found


def name_modules(torch, module, stack):
    """Names a module without a name, and the modules in it."""
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
        tensors = [*part._parameters.values(), *part._buffers.values()]
        paths.update((id(tensor), path) for tensor in tensors if tensor is not None)
        found += places(torch, "weights", tensors, path)
    # The inputs of a module have the module itself as owner.
    mark((id(module), "weights"), found)
    return names[id(module)]


def mark_optimizer(torch, optimizer):
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            path = paths.get(id(parameter), "")
            found += places(torch, "weights", [parameter], path) + places(torch, "gradients", [parameter.grad], path)
            found += places(torch, "optimizer", (optimizer.state.get(parameter) or {}).values(), path)
    mark(id(optimizer), found)


def mark_gradients(torch):
    """Returns the gradients at the end: no step of an optimizer came after their backward pass, for example because memory ran out."""
    found = []
    for reference, path in list(names.values()):
        parameters = getattr(reference(), "_parameters", None) or {}
        found += places(torch, "gradients", [parameter.grad for parameter in parameters.values() if parameter is not None], path)
    mark("end", found)


def mark(owner, found):
    """Notes that the tensors `found` exist now."""
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
    # The first marks stay: a program often needs most memory in its first steps.
    if len(known[0]) > MOST_TIMES:
        del known[0][1000 : MOST_TIMES // 2]
    while marked > MOST_MARKED and len(marks) > 20:
        dropped = marks.pop(10)
        marked -= len(dropped[1])
        for owner in [owner for owner, known in newest.items() if known is dropped]:
            del newest[owner]


# References are searched for at most this many tensors, and for at most this many seconds.
MOST_HELD = 10
MOST_SECONDS = 1


def holders(torch):
    """Returns the objects that refer to the largest tensors that exist now: a list of `(device, address, words)`."""
    import gc

    largest = []
    for thing in gc.get_objects():
        # `isinstance` would run code of objects that say they are of another type.
        if issubclass(type(thing), torch.Tensor) and thing.is_cuda:
            try:
                largest.append((thing.numel() * thing.element_size(), weakref.ref(thing)))
            except Exception:
                # The tensor has no memory.
                pass
    del thing
    largest.sort(key=lambda found: -found[0])
    until, made = time.monotonic() + MOST_SECONDS, {}
    for _, reference in largest:
        tensor = reference()
        if len(made) == MOST_HELD or time.monotonic() > until:
            break
        for _, *place, _ in places(torch, "", [tensor], ""):
            made.setdefault(tuple(place), []).extend(held_by(gc, tensor, set(), 4, until))
    # A module, whose name has its type, says most.
    order = lambda words: (": " not in words, words)
    return [(*where, "; ".join(sorted(set(words), key=order)[:3])) for where, words in made.items() if words]


def held_by(gc, thing, own, depth, until):
    """Describes the objects that refer to a tensor. `own` are the lists of this function, which also refer to it. There are no functions
    inside of functions here, because these would refer to it, too."""
    import types

    # Python looks at all objects of the program.
    if depth == 0 or time.monotonic() > until:
        return []
    holders = gc.get_referrers(thing)
    own.add(id(holders))
    made = []
    # A slice of the list would be one more object that refers to it.
    for at in range(min(20, len(holders))):
        holder = holders[at]
        if id(holder) in own or type(holder).__name__ == "list_iterator":
            continue
        words = key = ""
        known = names.get(id(holder))
        frame = holder if isinstance(holder, types.FrameType) else getattr(holder, "gi_frame", None) or getattr(holder, "cr_frame", None)
        if frame is not None:
            if frame.f_globals is not globals():
                name = key_of(dict(frame.f_locals), thing) or "a variable"
                words = "%s of %s (%s:%d)" % (name, frame.f_code.co_name, os.path.basename(frame.f_code.co_filename), frame.f_lineno)
        elif isinstance(holder, types.FunctionType):
            words = holder.__qualname__
        elif issubclass(type(holder), dict) or type(holder) in (list, tuple, set, types.CellType):
            key = key_of(holder, thing) if issubclass(type(holder), dict) else ""
            above = modules_of(holder) or held_by(gc, holder, own, depth - 1, until)
            # The variables of inner functions are cells in a tuple.
            kind = "" if type(holder) in (tuple, types.CellType) and above else key or type(holder).__name__
            words = " in ".join(filter(None, [kind, *above[:1]]))
        else:
            name = known[1] if known is not None and known[0]() is holder else type(holder).__name__
            key = key_of(getattr(holder, "__dict__", {}), thing)
            words = "%s of %s" % (key, name) if key else name
        if words:
            made.append(words)
    return made


def modules_of(holder):
    """Returns the module that has these global variables."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", None) is holder:
            return [module.__name__]
    return []


def key_of(holder, thing):
    # A class of the program may have other items.
    for key, value in list(dict.items(holder)) if issubclass(type(holder), dict) else []:
        if value is thing:
            # The text of another key is made by code of the program.
            return key[:100] if type(key) is str else type(key).__name__
    return ""
