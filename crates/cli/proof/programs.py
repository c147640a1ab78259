#!/usr/bin/env python3
"""The PyTorch programs of the proofs, which do not use gpumem. A program is a function with its settings:

    python crates/cli/proof/programs.py gpt2 '{"steps": 2}'

It prints one line of JSON: the peak of the memory that PyTorch's allocator got from the driver (`reserved`) and the peak of its tensors
(`allocated`), the sums of the weights and optimizer states that the program keeps, and all values that the function returns.
"""

import json
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
import traceback

import torch
from torch import distributed, nn
from torch.nn import functional

MIB, GIB = 1 << 20, 1 << 30
# The memory that a context takes on a simulated card.
CONTEXT = 527 * MIB
KEPT, TIMES = [], []


def figures():
    # Views of one tensor count once.
    def size(tensors):
        storages = (tensor.untyped_storage() for tensor in tensors if torch.is_tensor(tensor) and tensor.is_cuda)
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    weights = [tensor for net in KEPT if isinstance(net, nn.Module) for tensor in (*net.parameters(), *net.buffers())]
    optimizers = (kept for kept in KEPT if isinstance(kept, torch.optim.Optimizer))
    states = [state for optimizer in optimizers for each in optimizer.state.values() for state in each.values()]
    return {
        "device": torch.cuda.current_device(),
        "reserved": torch.cuda.max_memory_reserved(),
        "allocated": torch.cuda.max_memory_allocated(),
        "weights": size(weights),
        "optimizer": size(states),
        # The first steps also load libraries.
        "seconds": sum(TIMES[5:]),
    }


def trained(optimizer, steps, loss, update=None):
    """Trains with a function that computes the loss of a step."""
    for step in range(steps):
        began = time.perf_counter()
        if update:
            update(loss(step))
        else:
            loss(step).backward()
            optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        TIMES.append(time.perf_counter() - began)


def train(steps=60, mode="", compiled=False):
    """Trains with sizes that change from step to step, so that the allocator needs more memory from the driver. With the mode `empty`,
    each step requests all memory again."""
    layers = [nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048), nn.LayerNorm(2048)]
    model = nn.Sequential(*layers * 3, nn.Linear(2048, 1000)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    # The recording ends later than this function, so the blocks of a snapshot must still be live.
    KEPT.extend([model, optimizer])
    net = torch.compile(model, dynamic=True) if compiled else model
    if mode == "workers":
        # These processes are forked after CUDA was initialised, and do not use CUDA.
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8)), num_workers=2)
        assert sum(1 for _ in data) == 64

    def loss(step):
        if mode == "empty":
            torch.cuda.empty_cache()
        batch = 256 + 64 * (step % 5)
        x = torch.randn(batch, 2048, device="cuda")
        return functional.cross_entropy(net(x), torch.randint(0, 1000, (batch,), device="cuda"))

    trained(optimizer, 5, loss)
    facts = {}
    if mode == "profiler":
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            trained(optimizer, 1, loss)
        facts["events"] = sum(1 for event in profiled.events() if "CUDA" in str(event.device_type))
    trained(optimizer, steps, loss)
    if mode == "empty":
        torch.cuda.empty_cache()
    if mode == "lines":
        facts["lines"] = lines_of_snapshot(torch.cuda.memory._snapshot())
    return facts


def lines_of_snapshot(snapshot):
    """Returns the live blocks of PyTorch's own snapshot, by the innermost line of this file."""
    lines = {}
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        if block["state"] == "active_allocated":
            own = [f"{frame['filename']}:{frame['line']}" for frame in block.get("frames") or [] if frame["filename"] == __file__]
            line = own[0] if own else "none"
            lines[line] = lines.get(line, 0) + block["size"]
    return lines


def killed():
    """Kills itself at the end, so that no exit handlers run."""
    KEPT.extend(torch.empty(number * MIB, dtype=torch.uint8, device="cuda") for number in range(1, 60))
    print(json.dumps(figures()), flush=True)
    os.kill(os.getpid(), 9)


def hold(mebibytes, end, barrier):
    KEPT.append(torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda"))
    torch.cuda.synchronize()
    if barrier:
        barrier.wait()
        time.sleep(0.5)
    if end == "kill":
        os.kill(os.getpid(), 9)
    elif end == "exit":
        os._exit(0)


def processes(method, end, at_once):
    """Runs processes that hold 1 and 2 GiB until they end, at the same time or one after the other."""
    context = multiprocessing.get_context(method)
    barrier = context.Barrier(2) if at_once else None
    children = [context.Process(target=hold, args=(mebibytes, end, barrier)) for mebibytes in (1024, 2048)]
    for child in children:
        child.start()
        if not at_once:
            child.join()
    for child in children:
        child.join()


def gpt2(steps=4, lengths=(128, 512, 300, 1024), batch=4, layers=12, checkpoint=False, autocast=None, clip=False):
    """Trains GPT-2. With `clip`, gradients are clipped, and a scaler looks for infinite ones."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=layers)).cuda()
    if checkpoint:
        model.gradient_checkpointing_enable()
    optimizer, scaler = torch.optim.AdamW(model.parameters()), torch.amp.GradScaler("cuda", enabled=clip)

    def loss(step):
        x = torch.randint(0, 50257, (batch, lengths[step % len(lengths)]), device="cuda")
        with torch.autocast("cuda", dtype=getattr(torch, autocast or "bfloat16"), enabled=autocast is not None):
            return model(input_ids=x, labels=x, use_cache=False).loss

    def clipped(loss):
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()

    trained(optimizer, steps, loss, clipped if clip else None)
    KEPT.extend([model, optimizer])


def llama_model(hidden=1024, inner=2816, layers=8, heads=16, keys=4, words=32000, **more):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=keys, vocab_size=words, **more)).to(torch.bfloat16)


def llama(steps=3):
    model = llama_model().cuda()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss(step):
        x = torch.randint(0, 32000, (4, 1024), device="cuda")
        return model(input_ids=x, labels=x, use_cache=False).loss

    trained(optimizer, steps, loss)
    KEPT.extend([model, optimizer])


def generate():
    model = llama_model().cuda().eval()
    for length in (20, 100, 60):
        x = torch.randint(3, 32000, (2, length), device="cuda")
        model.generate(x, max_new_tokens=40, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(x))
    KEPT.append(model)


def vision(name, sizes, batch=16, steps=3, benchmark=False):
    import torchvision

    torch.backends.cudnn.benchmark = benchmark
    model = getattr(torchvision.models, name)().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def loss(step):
        size = sizes[step % len(sizes)]
        x = torch.randn(batch, 3, size, size, device="cuda")
        return functional.cross_entropy(model(x), torch.randint(0, 1000, (batch,), device="cuda"))

    trained(optimizer, steps, loss)
    KEPT.extend([model, optimizer])


def compiled(steps=3):
    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4)]
    model = nn.Sequential(*layers).cuda()
    step, optimizer = torch.compile(model), torch.optim.Adam(model.parameters())
    trained(optimizer, steps, lambda _: step(torch.randn(512, 1024, device="cuda")).square().mean())
    KEPT.extend([model, optimizer])


def tiny(steps=300):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20))).cuda()
    x = torch.randn(16, 64, device="cuda")
    trained(torch.optim.AdamW(model.parameters()), steps, lambda _: model(x).sum())


def ranks(backend, size=4096, layers=8, bias=True, sharded=False, steps=3):
    """Trains one rank of DDP or FSDP. With one GPU, NCCL must take each rank for a separate machine."""
    rank, cards = int(os.environ["RANK"]), torch.cuda.device_count()
    if cards == 1:
        os.environ["NCCL_HOSTID"] = f"machine{rank}"
    torch.cuda.set_device(rank % cards)
    distributed.init_process_group(backend)
    model = nn.Sequential(*(nn.Linear(size, size, bias=bias) for _ in range(layers))).cuda()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    trained(torch.optim.Adam(model.parameters()), steps, lambda _: model(torch.randn(256, size, device="cuda")).sum())
    distributed.destroy_process_group()
    return {"rank": rank}


def blocks():
    shuffled, kept = random.Random(5), {}
    for number in range(400):
        kept[number] = torch.empty(shuffled.randint(1, 12 * MIB), dtype=torch.uint8, device="cuda")
        while len(kept) > 60:
            del kept[shuffled.choice(list(kept))]


def streams():
    streams = [torch.cuda.Stream() for _ in range(4)]
    for step in range(20):
        for number, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                x = torch.ones(((step * 7 + number * 3) % 10 + 1) * MIB, device="cuda")
                y = x * 2
                y.record_stream(streams[(number + 1) % 4])
                del x, y
    torch.cuda.synchronize()


def empty_cache():
    for size in (300, 20, 700, 5):
        x = [torch.ones(size * MIB // 8, device="cuda") for _ in range(3)]
        del x
        if size == 20:
            torch.cuda.empty_cache()


def graph():
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 1024)).cuda()
    x = torch.randn(2048, 1024, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):
            model(x).sum().backward()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(captured):
        y = model(x)
        y.sum().backward()
    for _ in range(5):
        captured.replay()
    y.sum().item()


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        return torch.full((3, 128, 128), float(at)), at


def loader():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
    for x, y in torch.utils.data.DataLoader(Images(), batch_size=16, num_workers=2, pin_memory=True):
        functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda() % 10).backward()


def masks():
    """Computes lengths and stop criteria on the device, in small tensors."""
    lengths = torch.tensor([3, 9, 5], device="cuda")
    steps = 0
    while bool((lengths > 0).any()):
        lengths -= 1
        steps += 1
        torch.ones(int(lengths.clamp(min=0).sum()) + 1, 4 * MIB, dtype=torch.uint8, device="cuda")
    assert steps == 9, steps


def moe():
    """Runs experts that a small router chooses, so that shapes depend on the data."""
    experts, router = nn.ModuleList([nn.Linear(512, 2048) for _ in range(8)]).cuda(), nn.Linear(512, 8).cuda()
    x = torch.randn(256, 512, device="cuda")
    chosen = router(x).argmax(-1)
    for number, expert in enumerate(experts):
        rows = (chosen == number).nonzero().flatten()
        expert(x[rows]).sum().backward()


def out_of_memory():
    """Tries smaller batches until memory suffices. The result depends on the size of the card."""
    batch, tried = 1 << 20, 0
    while True:
        try:
            torch.empty(batch, 256, 1024, device="cuda")
            return {"tried": tried, "batch": batch}
        except torch.cuda.OutOfMemoryError:
            batch, tried = batch // 2, tried + 1


def refused():
    """Requests too much memory twice: once, PyTorch gets it after it has emptied its cache; once, it does not."""
    free, _ = torch.cuda.mem_get_info()
    most = (free // (2 * MIB) - 256) * 2 * MIB
    torch.empty(most // 2, dtype=torch.uint8, device="cuda")
    KEPT.append(torch.empty(most * 3 // 4 // (2 * MIB) * 2 * MIB, dtype=torch.uint8, device="cuda"))
    size = most // 2 // (2 * MIB) * 2 * MIB
    try:
        line = sys._getframe().f_lineno + 1
        torch.empty(size, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        pass
    stats = torch.cuda.memory_stats()
    retries, refusals = stats["num_alloc_retries"], stats["num_ooms"]
    # PyTorch requests the memory, empties its cache and requests it again.
    facts = {"refusals": retries + refusals, "obtained": retries - refusals, "refused": size}
    return {**facts, "line": f"programs.py:{line}", "had": torch.cuda.memory_reserved()}


def dormant():
    """Allocates, and waits for a line of stdin after each step."""
    kept = []
    for mebibytes in (100, 200, 300, 400):
        if mebibytes == 300:
            kept.clear()
            torch.cuda.empty_cache()
        kept.append(torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda"))
        print(os.getpid(), flush=True)
        sys.stdin.readline()


def stacks():
    """Allocates blocks of different sizes, and returns the Python functions that were on the stack at each."""
    expected, sizes = [], iter(range(6, 100))

    def keep(size, stack, tensor):
        expected.append([size, [(frame.filename, frame.lineno, frame.name) for frame in reversed(stack)]])
        KEPT.append(tensor)

    def here():
        # The call is on one line, so that the last frame has the line of the allocation.
        size = next(sizes) * 2 * MIB
        keep(size, traceback.extract_stack(), torch.empty(size, dtype=torch.uint8, device="cuda"))

    class Layer(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            here()
            return self.inner(x) if self.inner else x

    def generator():
        for _ in range(2):
            here()
            yield

    here()
    Layer(Layer(Layer(None)))(0)
    list(generator())
    [here() for _ in range(2)]
    thread = threading.Thread(target=here)
    thread.start()
    thread.join()
    return {"expected": expected}


def two():
    """Allocates on both cards of a machine, and copies between them."""
    x, y = (torch.ones(512 * MIB, device=f"cuda:{number}") for number in range(2))
    x.to("cuda:1") + y
    total = [torch.cuda.get_device_properties(number).total_memory for number in range(2)]
    return {"total": total, "count": torch.cuda.device_count(), "sum": int(torch.arange(5, device="cuda:1").sum())}


def eight_sees():
    """Queries the cards. This program and the next three see eight cards of 24 GiB."""
    properties = [torch.cuda.get_device_properties(number) for number in range(8)]
    free = [torch.cuda.mem_get_info(number) for number in range(torch.cuda.device_count())]
    found = [free, [card.total_memory for card in properties], len({str(card.uuid) for card in properties})]
    return {"found": found, "expected": [[(24 * GIB - CONTEXT, 24 * GIB)] * 8, [24 * GIB] * 8, 8]}


def eight_small():
    x = torch.arange(6, device="cuda:5")
    y = x.to("cuda:2") * 2
    torch.cuda.set_device(3)
    z = torch.ones(4, device="cuda")
    found = [str(x.device), int(x.sum()), str(y.device), y.tolist(), str(z.device), torch.cuda.current_device()]
    torch.cuda.set_device(0)
    return {"found": found, "expected": ["cuda:5", 15, "cuda:2", [0, 2, 4, 6, 8, 10], "cuda:3", 3]}


def eight_full():
    """Requests 20 GiB and then 10 GiB on one card, which is rejected, and 10 GiB on another card."""
    take = lambda gib, card: torch.empty(gib * GIB, dtype=torch.uint8, device=f"cuda:{card}")
    free = lambda card: torch.cuda.mem_get_info(card)[0]
    first = take(20, 1)
    try:
        return {"found": take(10, 1).numel(), "expected": "an error"}
    except torch.cuda.OutOfMemoryError as error:
        names_card = "GPU 1" in str(error)
    other = take(10, 0)
    found = [names_card, free(1), 13 * GIB < free(0) < 14 * GIB]
    del first, other
    torch.cuda.empty_cache()
    again = take(22, 1)
    found.append(free(1))
    del again
    torch.cuda.empty_cache()
    return {"found": found, "expected": [True, 4 * GIB - CONTEXT, True, 2 * GIB - CONTEXT]}


def eight_parallel():
    """Trains on four threads, each with a card, a copy of the weights (256 MiB), and a quarter of the batch."""
    model = nn.DataParallel(nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).cuda(), device_ids=range(4))
    optimizer = torch.optim.Adam(model.parameters())
    [torch.cuda.reset_peak_memory_stats(number) for number in range(8)]
    for _ in range(2):
        loss = model(torch.randn(4096, 4096, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    most = [torch.cuda.max_memory_allocated(number) // MIB for number in range(8)]
    found = [str(loss.device), [256 < mebibytes < 1024 for mebibytes in most[1:4]], most[4:]]
    return {"found": found, "expected": ["cuda:0", [True] * 3, [0] * 4], "most": most}


def stages(alone=None):
    """Runs a model with eight stages on eight cards, or only one stage on the first card."""
    size, batch = 4096, 2048
    place = lambda stage: f"cuda:{0 if alone is not None else stage}"
    used = range(8) if alone is None else [alone]
    stages = {stage: nn.Sequential(*[nn.Linear(size, size) for _ in range(1 + stage % 3)]).to(place(stage)) for stage in used}
    optimizer = torch.optim.AdamW([weight for stage in stages.values() for weight in stage.parameters()], foreach=False)

    def loss(_):
        x = torch.randn(batch, size, requires_grad=alone not in (None, 0))
        for stage in used:
            x = stages[stage](x.to(place(stage)))
        return (x if alone in (None, 7) else x.cpu()).sum()

    trained(optimizer, 3, loss)
    return {"cards": [torch.cuda.max_memory_reserved(number) for number in range(torch.cuda.device_count())]}


def split():
    """Runs a forward pass of Llama 70B in bf16, in eight parts of ten layers."""
    hidden, middle, keys, layers, tokens = 8192, 28672, 1024, 80, 2048
    attention, mlp = [(hidden,), (hidden, hidden), (keys, hidden), (keys, hidden), (hidden, hidden)], [(hidden,), (middle, hidden)]
    shapes = [*attention, *mlp, (middle, hidden), (hidden, middle)]
    place = lambda layer: f"cuda:{layer // 10}"
    weights = [[torch.empty(shape, dtype=torch.bfloat16, device=place(layer)) for shape in shapes] for layer in range(layers)]
    has = [torch.cuda.memory_allocated(number) for number in range(8)]
    x = torch.zeros(1, tokens, hidden, dtype=torch.bfloat16, device="cuda:0")
    with torch.no_grad():
        for layer, (n1, q, k, v, o, n2, gate, up, down) in enumerate(weights):
            x = x.to(place(layer))
            h = functional.rms_norm(x, (hidden,), n1)
            heads = [(h @ w.T).view(1, tokens, -1, 128).transpose(1, 2) for w in (q, k, v)]
            attended = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
            x = x + attended.transpose(1, 2).reshape(1, tokens, hidden) @ o.T
            h = functional.rms_norm(x, (hidden,), n2)
            x = x + (functional.silu(h @ gate.T) * (h @ up.T)) @ down.T
    torch.cuda.synchronize()
    expected = 10 * sum(2 * torch.Size(shape).numel() for shape in shapes)
    return {"has": has, "expected": [expected] * 8, "peak": [torch.cuda.max_memory_reserved(number) for number in range(8)]}


def full(seconds):
    """Keeps 10 GiB for some seconds, unless the request is rejected."""
    try:
        KEPT.append(torch.empty(10 * GIB, dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError:
        return {"rank": 1, "has": 0}
    print(json.dumps({"rank": 0, "has": torch.cuda.memory_reserved()}), flush=True)
    time.sleep(seconds)
    sys.exit()


def watched():
    """Runs steps, prints the time of one, and waits so that other programs can look at the process."""
    KEPT.append(torch.empty(GIB, dtype=torch.uint8, device="cuda"))
    torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
    torch.cuda.empty_cache()
    times = []
    for _ in range(420):
        began = time.perf_counter()
        x = torch.randn(4096, 4096, device="cuda")
        (x @ x).sum().item()
        times.append(time.perf_counter() - began)
    print(json.dumps({"step": statistics.median(times[20:]), "reserved": torch.cuda.max_memory_reserved()}), flush=True)
    time.sleep(3)


def spikes(base):
    """Keeps some bytes, and for each line of stdin allocates and frees that many bytes more."""
    KEPT.append(torch.empty(base, dtype=torch.uint8, device="cuda"))
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        torch.empty(int(line), dtype=torch.uint8, device="cuda")
        print((time.perf_counter() - began) * 1e3, flush=True)


def fill(left):
    """Fills the GPU except for a number of bytes, until stdin ends."""
    torch.cuda.init()
    KEPT.append(torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device="cuda"))
    print(torch.cuda.mem_get_info()[0], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    # The allocations of a program may depend on its data.
    torch.manual_seed(0)
    facts = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    print(json.dumps({**figures(), **(facts or {})}), flush=True)
