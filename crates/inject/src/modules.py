# Runs after `torch.py`, with `--modules`. Tells PyTorch's allocator which module allocates, and notes which tensors are weights, gradients
# and optimizer states. Does not change any argument or result of the program.

import threading
import time
import warnings
import weakref

# The names of the program's modules, by `id`: a weak reference, and the path with the type.
names = {}
# The modules that own the parameters, by the `id` of the parameter.
paths = {}
# The stack of modules that each thread is in.
here = threading.local()
# The tensors that had a class, with the times at which they had it: `[times, tensors]`. A tensor is `(class, device, address, path)`, with
# True at the end if autocast casts it.
marks = []
# The latest mark of each owner.
newest = {}
# The maximum number of tensors in all marks together, and of times in each mark.
MOST_MARKED = 300_000
MOST_TIMES = 50_000
marked = 0
is_observing = False
# The hooks.
hooks = []
# The maximum number of modules that have names at a time.
MOST_NAMES = 100_000


def observe_modules(torch):
    """Starts to observe modules. Runs when PyTorch has initialised CUDA. Returns the reason if it fails."""
    global is_observing
    tell = getattr(torch._C, "_cuda_setMemoryMetadata", None)
    if tell is None:
        return "it is older than 2.10"
    if is_observing:
        return None
    is_observing = True
    is_compiling = torch.compiler.is_compiling
    is_casting = getattr(torch, "is_autocast_enabled", lambda: False)

    def enter(module, inputs):
        # torch.compile compiles this function too, and must not see any of its code.
        if is_compiling():
            return
        try:
            stack = here.__dict__.setdefault("stack", [])
            known = names.get(id(module))
            if known is None or known[0]() is not module:
                # A module may raise when its parts are listed. `leave` expects it on the stack in any case.
                known = weakref.ref(module), stack[-1][1] if stack else ""
                try:
                    known = name_modules(torch, module, stack)
                except Exception:
                    pass
            # Autocast keeps copies of 32-bit weights.
            casts = is_casting() and any(map(is_cast, module._parameters.values()))
            stack.append((*known, known[1] + " [autocast]" if casts else known[1]))
            tell(stack[-1][2])
            # A layer that a checkpoint runs again is not inside another module.
            if "." not in known[1]:
                mark(id(module), places(torch, "inputs", inputs, known[1]))
        except Exception:
            pass

    def leave(module, inputs, *others):
        if is_compiling():
            return
        try:
            stack = here.stack
            # If a module raised, this function may not have been called for it.
            left = stack.pop()
            while left[0]() is not module:
                left = stack.pop()
            tell(stack[-1][2] if stack else "")
            # PyTorch passes keyword arguments only to this function, and only if the module did not raise.
            if len(others) == 2 and "." not in left[1]:
                mark((id(module), "keywords"), places(torch, "inputs", others[0].values(), left[1]))
        except Exception:
            tell("")

    def stepped(optimizer, arguments, keywords):
        try:
            mark_optimizer(torch, optimizer)
        except Exception:
            pass

    # PyTorch would warn about hooks that the program did not add.
    warnings.filterwarnings("ignore", r"Using `torch.compile\(module\)` when there are global hooks")
    modules = sys.modules["torch.nn.modules.module"]
    hooks.append(modules.register_module_forward_pre_hook(enter))
    hooks.append(modules.register_module_forward_hook(leave, with_kwargs=True, always_call=True))
    from torch.optim.optimizer import register_optimizer_step_post_hook

    hooks.append(register_optimizer_step_post_hook(stepped))


def leave_modules():
    """Stops observing modules, and forgets them: another recording may start later."""
    global is_observing, marked
    while hooks:
        hooks.pop().remove()
    for known in (names, paths, marks, newest):
        known.clear()
    is_observing, marked = False, 0


def is_cast(weight):
    """Returns whether autocast casts a weight."""
    return str(getattr(weight, "dtype", "")) == "torch.float32"


def places(torch, name, tensors, path):
    """Returns the tensors that are on a device, in the form of a mark."""
    found = []
    for tensor in tensors:
        # Tensors of torch.compile and torch.export have no memory, and PyTorch warns when their addresses are read.
        if type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
            continue
        try:
            # This is the part of a distributed tensor that this rank has.
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
        for tensor in tensors:
            found += [(*place, True) if is_cast(tensor) else place for place in places(torch, "weights", [tensor], path)]
    # Inputs of a module have the module itself as their owner.
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
    """Marks the gradients that exist at the end. No optimizer step came after their backward pass, for example because memory ran out."""
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
    # The first marks are kept, because a program often needs the most memory in its first steps.
    if len(known[0]) > MOST_TIMES:
        del known[0][1000 : MOST_TIMES // 2]
    while marked > MOST_MARKED and len(marks) > 20:
        dropped = marks.pop(10)
        marked -= len(dropped[1])
        for owner in [owner for owner, known in newest.items() if known is dropped]:
            del newest[owner]


# The limits of the search for references: the number of tensors, and the seconds.
MOST_HELD = 10
MOST_SECONDS = 1
# The maximum number of exception frames that are checked.
MOST_KEPT = 100_000
# The object that keeps each frame that has ended: the exception, or else the traceback. By the `id` of the frame, only during the search.
kept = {}


def holders(torch):
    """Returns the objects that refer to the largest tensors that exist now: a list of `(device, address, words)`."""
    import gc
    import types

    largest, raised, tracebacks = [], [], []
    for thing in gc.get_objects():
        # `isinstance` would run code of objects that pretend to have another type.
        if issubclass(type(thing), torch.Tensor) and thing.is_cuda:
            try:
                largest.append((thing.numel() * thing.element_size(), weakref.ref(thing)))
            except Exception:
                # The tensor has no memory.
                pass
        elif issubclass(type(thing), BaseException):
            raised.append(thing)
        elif type(thing) is types.TracebackType:
            tracebacks.append(thing)
    del thing
    largest.sort(key=lambda found: -found[0])
    end, made = time.monotonic() + MOST_SECONDS, {}
    try:
        note_kept(raised, tracebacks, end)
        raised.clear()
        tracebacks.clear()
        for _, reference in largest:
            tensor, now = reference(), time.monotonic()
            if len(made) == MOST_HELD or now > end:
                break
            for _, *place, _ in places(torch, "", [tensor], ""):
                found = made.setdefault(tuple(place), [])
                try:
                    found += held_by(gc, tensor, {id(kept)}, 4, min(end, now + MOST_SECONDS / 4))
                except Exception:
                    # An object of the program raised.
                    pass
    finally:
        kept.clear()
    return [(*where, "; ".join(joined(words)[:3])) for where, words in made.items() if words]


def joined(words):
    """Returns the words without repetitions. Variables that the same exception keeps share one entry."""
    ways = {}
    for text in sorted(set(words)):
        way, _, variable = text.rpartition(WAY)
        ways.setdefault(way, []).append(variable)
    made = [way + WAY * bool(way) + text for way, found in ways.items() for text in ([", ".join(found)] if way else found)]
    # A module is the most useful answer, so modules come first; their names contain a type. Cycles come last, because they do not matter if
    # something else keeps the tensor.
    return sorted(made, key=lambda text: (CYCLE in text, WAY in text or ": " not in text))


def note_kept(raised, tracebacks, until):
    """Fills `kept`. A frame that has ended keeps its variables and the frames that called it alive."""
    inner = {id(at.tb_next) for at in tracebacks}
    chains = [(error, BaseException.__traceback__.__get__(error)) for error in raised]
    chains += [(at, at) for at in tracebacks if id(at) not in inner]
    running = set()
    for frame in sys._current_frames().values():
        while frame is not None:
            running.add(id(frame))
            frame = frame.f_back
    for keeper, at in chains:
        if time.monotonic() > until:
            break
        while at is not None and len(kept) < MOST_KEPT:
            frame, at = at.tb_frame, at.tb_next
            while frame is not None and id(frame) not in kept and id(frame) not in running:
                kept[id(frame)] = keeper
                frame = frame.f_back


def held_by(gc, thing, own, depth, until):
    """Describes the objects that refer to a thing. `own` are the lists of this function, which also refer to it, and the exceptions that it
    follows. This function has no inner functions, because these would refer to the thing as well."""
    import types

    attributes = {types.GeneratorType: "gi_frame", types.CoroutineType: "cr_frame", types.AsyncGeneratorType: "ag_frame"}
    # The search is limited, because `gc.get_referrers` checks all objects of the program.
    if depth == 0 or time.monotonic() > until:
        return []
    holders = gc.get_referrers(thing)
    own.add(id(holders))
    made = []
    # A slice of the list would be another object that refers to it.
    for at in range(min(20, len(holders))):
        holder = holders[at]
        if id(holder) in own or type(holder).__name__ == "list_iterator":
            continue
        words = key = ""
        known = names.get(id(holder))
        attribute = attributes.get(type(holder))
        frame = getattr(holder, attribute) if attribute else holder if type(holder) is types.FrameType else None
        if frame is not None:
            if frame.f_globals is not globals():
                words = of_frame(gc, holder, frame, thing, own, depth, until)
        elif isinstance(holder, types.FunctionType):
            words = holder.__qualname__
        elif known is not None and known[0]() is holder:
            key = key_of(holder.__dict__, thing)
            words = "%s of %s" % (key, known[1]) if key else known[1]
        elif issubclass(type(holder), dict):
            key = key_of(holder, thing)
            above = modules_of(holder) or held_by(gc, holder, own, depth - 1, until)
            words = within(key or "dict", above, not key)
        elif type(holder) is not types.TracebackType:
            above, kind = held_by(gc, holder, own, depth - 1, until), type(holder).__name__
            variables = getattr(holder, "__dict__", None)
            if variables is thing:
                words = "of " + within(kind, above)
            elif type(holder) in (tuple, types.CellType) and above:
                # Variables of inner functions are cells in a tuple.
                words = above[0]
            else:
                key = key_of(variables, thing)
                words = within("%s of %s" % (key, kind) if key else kind, above)
        if words:
            made.append(words)
    made.sort(key=lambda words: CYCLE in words)
    return made


CYCLE = ", a cycle that gc.collect() frees"
# Separates an exception from the variables that it keeps.
WAY = ", keeps "


def within(kind, above, is_type=True):
    """Returns words such as `list losses in __main__`, where `above` describes the list, or `list in tuple`."""
    if not above:
        return kind
    is_variable = is_type and above[0].split(" ")[1:2] in (["in"], ["of"])
    return "%s %s%s" % (kind, "" if is_variable or above[0].startswith("of ") else "in ", above[0])


def of_frame(gc, holder, frame, thing, own, depth, until):
    """Describes a variable of a function, and the object that keeps the function's frame if it does not run."""
    own.add(id(frame.f_locals))
    name = key_of(dict(frame.f_locals), thing) or "a variable"
    file = os.path.basename(frame.f_code.co_filename)
    words = "%s of %s (%s:%d)" % (name, frame.f_code.co_name, file, frame.f_lineno or 0)
    keeper = kept.get(id(frame), holder)
    if id(keeper) in own:
        return words + CYCLE
    own.add(id(keeper))
    above = held_by(gc, keeper, own, depth, until)
    own.discard(id(keeper))
    kind = type(keeper).__name__
    if issubclass(type(keeper), BaseException):
        how = "the traceback of %s %s" % ("an" if kind[0] in "AEIOU" else "a", kind)
    elif above:
        how = "a " + kind
    else:
        return words
    return (above[0] + ", through " if above else "") + how + WAY + words


def modules_of(holder):
    """Returns the name of the module that has these global variables, in a list."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", None) is holder:
            return [module.__name__]
    return []


def key_of(holder, thing):
    # A class of the program may override `items`.
    for key, value in list(dict.items(holder)) if issubclass(type(holder), dict) else []:
        if value is thing:
            # For any other key, making a text would run code of the program.
            return key[:100] if type(key) is str else type(key).__name__
    return ""
