#!/usr/bin/env python3
"""The programs of the proofs that use libraries other than PyTorch. They run like the programs in `programs.py`."""

import ctypes
import json
import os
import sys

KEPT = []


def jax(size=2048):
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax as module
    import jax.numpy as numpy

    def loss(w, x):
        for _ in range(4):
            x = numpy.tanh(x @ w)
        return x.sum()

    w, x = numpy.ones((size, size)), numpy.ones((2 * size, size))
    step = module.jit(module.value_and_grad(loss))
    for _ in range(3):
        value, gradient = step(w, x)
        w = w - 0.1 * gradient
    module.block_until_ready(w)
    stats = module.devices()[0].memory_stats()
    return {"reserved": stats.get("peak_pool_bytes", stats["peak_bytes_in_use"]), "allocated": stats["peak_bytes_in_use"]}


def cupy():
    import cupy as module

    x = module.random.rand(4096, 4096)
    y = x @ x
    z = module.sort(y, axis=0) + module.fft.fft2(x).real
    float(z[0, 0])
    pool = module.get_default_memory_pool()
    return {"reserved": pool.total_bytes(), "allocated": pool.used_bytes()}


class Driver:
    """The driver, without the CUDA runtime, which compares the devices with its own list."""

    def __init__(self):
        self.library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)

    def __call__(self, name, *arguments):
        code = getattr(self.library, name)(*arguments)
        if code:
            raise RuntimeError(f"{name}: {code}")

    def use(self, device):
        context = ctypes.c_void_p()
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)

    def allocate(self, size):
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address


def driver():
    """Allocates memory on each device, and requests more than the last one has."""
    cuda, count, free, totals = Driver(), ctypes.c_int(), [], []
    cuda("cuDeviceGetCount", ctypes.byref(count))
    for device in range(count.value):
        left, total = ctypes.c_size_t(), ctypes.c_size_t()
        cuda.use(device)
        cuda.allocate((4 + device) << 30)
        cuda("cuMemGetInfo_v2", ctypes.byref(left), ctypes.byref(total))
        free.append(left.value)
        totals.append(total.value)
    refused = cuda.library.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(10 << 30))
    return {"free": free, "totals": totals, "refused": refused}


def libcupti():
    """Returns the path of libcupti: on the loader's path, in a toolkit, or in a Python package."""
    names = ["libcupti.so.13", "libcupti.so.12"]
    folders = ["/usr/local/cuda/extras/CUPTI/lib64", "/usr/local/cuda/lib64"]
    for path in sys.path:
        folders += [f"{path}/nvidia/cu13/lib", f"{path}/nvidia/cuda_cupti/lib"]
    for file in [*names, *(f"{folder}/{name}" for folder in folders for name in names)]:
        try:
            ctypes.CDLL(file)
            return file
        except OSError:
            pass
    return None


def observed_calls():
    """Subscribes to CUPTI as another tool would. Returns a list to which each call of cuMemAlloc_v2 adds an item."""
    library, subscriber, calls = ctypes.CDLL(libcupti()), ctypes.c_void_p(), []

    @ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p)
    def observed(_data, _domain, _number, call):
        # The first field is CUPTI's `callbackSite`; 1 means the exit of the call.
        if ctypes.cast(call, ctypes.POINTER(ctypes.c_int)).contents.value == 1:
            calls.append(call)

    # The function must stay alive, because CUPTI calls it as long as the subscription lasts.
    KEPT.append(observed)
    code = library.cuptiSubscribe(ctypes.byref(subscriber), observed, None)
    assert code == 0, f"cuptiSubscribe: {code}"
    driver_api, mem_alloc = 1, 243
    code = library.cuptiEnableCallback(1, subscriber, driver_api, mem_alloc)
    assert code == 0, f"cuptiEnableCallback: {code}"
    return calls


def cupti(order):
    """Subscribes to CUPTI as another tool, before or after the driver and with it gpumem's library is loaded. Uses only the driver."""
    calls = observed_calls() if order == "before" else None
    cuda = Driver()
    cuda.use(0)
    calls = observed_calls() if calls is None else calls
    sizes = [(number + 1) * 700_001 for number in range(20)]
    for address in [cuda.allocate(size) for size in sizes]:
        cuda("cuMemFree_v2", address)
    return {"calls": len(calls), "sizes": len(sizes), "most": sum(sizes)}


def field(number, value):
    """Returns a field of a message in the format of Protocol Buffers."""

    def varint(value):
        low, high = value & 0x7F, value >> 7
        return bytes([low | 0x80]) + varint(high) if high else bytes([low])

    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    value = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(value)) + value


def onnx_model(weights):
    """Returns a model that multiplies by each of the matrices, with Relu after each. The field numbers come from onnx.proto."""
    float32, nodes, initializers, name = 1, b"", b"", "x"
    for number, weight in enumerate(weights):
        product, result = f"product{number}", f"result{number}"
        nodes += field(1, field(1, name) + field(1, f"w{number}") + field(2, product) + field(4, "MatMul"))
        nodes += field(1, field(1, product) + field(2, result) + field(4, "Relu"))
        dims = b"".join(field(1, size) for size in weight.shape)
        initializers += field(5, dims + field(2, float32) + field(8, f"w{number}") + field(9, weight.tobytes()))
        name = result

    def value(name, width):
        shape = field(1, field(2, "batch")) + field(1, field(1, width))
        return field(1, name) + field(2, field(1, field(1, float32) + field(2, shape)))

    inputs, outputs = field(11, value("x", weights[0].shape[0])), field(12, value(name, weights[-1].shape[1]))
    graph = nodes + field(2, "products") + initializers + inputs + outputs
    return field(1, 8) + field(7, graph) + field(8, field(1, "") + field(2, 13))


def onnx(strategy):
    """Runs a model for some batch sizes. ONNX Runtime's log on stderr contains the requests of its arenas."""
    import numpy
    import onnxruntime

    # The arenas write to the default log.
    onnxruntime.set_default_logger_severity(0)
    random, width, provider = numpy.random.default_rng(0), 2048, "CUDAExecutionProvider"
    weights = [random.standard_normal((width, width), dtype=numpy.float32) / 32 for _ in range(3)]
    settings = {"arena_extend_strategy": strategy, "use_tf32": "0"}
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(onnx_model(weights), options, providers=[(provider, settings)])
    if session.get_providers()[0] != provider:
        sys.exit(f"{provider} is not used, but {session.get_providers()}")
    difference = 0
    # A tensor of 128 rows has 1 MiB. No smaller block is requested, because gpumem records no stacks for smaller blocks.
    for batch in (128, 768, 256, 1024):
        run = onnxruntime.RunOptions()
        if strategy == "kSameAsRequested" and batch != 1024:
            run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "gpu:0")
        x = random.standard_normal((batch, width), dtype=numpy.float32)
        if strategy == "kNextPowerOfTwo" and batch == 768:
            # A tensor of the program, from an arena that does not belong to the session.
            KEPT.append(onnxruntime.OrtValue.ortvalue_from_numpy(x, "cuda", 0))
            y = session.run_with_ort_values(None, {"x": KEPT[-1]}, run)[0].numpy()
        else:
            y = session.run(None, {"x": x}, run)[0]
        for weight in weights:
            x = numpy.maximum(x @ weight, 0)
        difference = max(difference, float(abs(x - y).max() / abs(x).max()))
    KEPT.append(session)
    print(json.dumps({"version": onnxruntime.__version__, "difference": difference}), flush=True)
    if strategy == "kSameAsRequested":
        # The process ends without exit handlers and destructors.
        os._exit(5)
    sys.exit(5)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
