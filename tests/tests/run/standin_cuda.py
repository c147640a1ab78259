# The driver's functions, for programs of tests.
import ctypes

cuda = ctypes.CDLL("libcuda.so.1")
MIB = 1 << 20
word = ctypes.c_uint64


def call(name, *arguments):
    passed = [ctypes.byref(a) if isinstance(a, ctypes._SimpleCData) and not isinstance(a, ctypes.c_void_p) else a for a in arguments]
    passed = [word(a) if isinstance(a, int) else a for a in passed]
    return getattr(cuda, name)(*passed)


def alloc(mib):
    address = word()
    return call("cuMemAlloc_v2", address, mib * MIB), address.value


def info():
    free, total = word(), word()
    assert call("cuMemGetInfo_v2", free, total) == 0
    return free.value // MIB, total.value // MIB


def read(address):
    buffer = ctypes.create_string_buffer(b"\x11" * 4, 4)
    code = call("cuMemcpyDtoH_v2", ctypes.cast(buffer, ctypes.c_void_p), address, 4)
    return code, buffer.raw.hex()


def launch(*addresses, kind=0):
    """The code, and whether it was executed."""
    before = cuda.standin_executed()
    values = [word(address) for address in addresses]
    parameters = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    code = call("cuLaunchKernel", kind + len(addresses), 1, 1, 1, 1, 1, 1, 0, 0, ctypes.cast(parameters, ctypes.c_void_p), 0)
    return code, cuda.standin_executed() - before


def enter(device):
    """Makes the primary context of a device current."""
    context = ctypes.c_void_p()
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0 and cuda.cuCtxSetCurrent(context) == 0
    return context
