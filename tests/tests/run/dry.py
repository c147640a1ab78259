# A program that uses a card in the ways in which dry memory could be noticed. It prints what it saw.
import ctypes
import json
import os
import sys

from standin_cuda import MIB, alloc, call, cuda, enter, info, launch, launched, read, word


def join(rows, *addresses):
    """Launches the function of PyTorch that joins so many tensors. It reads no other address."""
    return launched(1000, rows, [(word * 128)(*addresses)])


seen = {}
total = word()
assert call("cuInit", 0) == 0
enter(0)
call("cuDeviceTotalMem_v2", total, 0)
seen["total"], seen["free"] = total.value // MIB, info()
code, large = alloc(int(sys.argv[1]))
seen["large"], seen["after"], seen["refused"] = code, info(), alloc(int(sys.argv[1]))[0]
code, small = alloc(1)
_, table = alloc(1)
seen["read"] = [read(large + 3 * MIB), read(small)]
seen["launch"] = [launch(large), launch(small), launch(small, large + 5), launch()]
seen["join"] = [join(2, small, table, large), join(3, small, table, large)]
seen["collective"] = launched(101, 1, [word(small)])
# A table of addresses: a kernel would read the large block through it.
addresses = (word * 2)(small, large)
seen["copied"] = call("cuMemcpyHtoD_v2", table, ctypes.cast(addresses, ctypes.c_void_p), 16)
seen["through a table"] = launch(table)
start, size = word(), word()
seen["range"] = call("cuMemGetAddressRange_v2", start, size, large + 1), start.value == large, size.value // MIB
kind, managed = ctypes.c_uint32(7), ctypes.c_uint32(7)
seen["kind"] = call("cuPointerGetAttribute", kind, 2, large), kind.value
seen["managed"] = call("cuPointerGetAttribute", managed, 8, large), managed.value

# Memory that the program maps itself, as expandable segments of PyTorch do.
properties = (ctypes.c_int32 * 8)(1, 0, 1, 0)
handle, at, again = word(), word(), word()
seen["create"] = call("cuMemCreate", handle, 20 * MIB, ctypes.cast(properties, ctypes.c_void_p), 0)
call("cuMemAddressReserve", at, 20 * MIB, 0, 0, 0)
seen["map"] = call("cuMemMap", at.value, 20 * MIB, 0, handle.value, 0)
seen["access"] = call("cuMemSetAccess", at.value, 20 * MIB, ctypes.cast(properties, ctypes.c_void_p), 1)
seen["retain"] = call("cuMemRetainAllocationHandle", again, at.value), again.value == handle.value
seen["mapped"] = info()[0], launch(at.value + 8)
# What another process gets takes nothing of the card.
shared, imported = ctypes.c_int32(-1), word()
seen["shared"] = [call("cuMemExportToShareableHandle", shared, handle.value, kind, 0) for kind in (8, 1)]
before = info()[0]
seen["imported"] = [call("cuMemImportFromShareableHandle", imported, descriptor, 1) for descriptor in (shared.value, 0)]
call("cuMemAddressReserve", again, 20 * MIB, 0, 0, 0)
seen["imported"] += [call("cuMemMap", again.value, 20 * MIB, 0, imported.value, 0), launch(again.value), info()[0] - before]
seen["imported"] += [call("cuMemUnmap", again.value, 20 * MIB), [call("cuMemRelease", imported.value) for _ in range(2)], info()[0] - before]
for _ in range(2):
    assert call("cuMemRelease", handle.value) == 0
seen["unmap"] = call("cuMemUnmap", at.value, 20 * MIB), info()[0]

# Memory that a graph would allocate is refused: the card would not know of it.
graph, properties = ctypes.c_void_p(), (ctypes.c_int32 * 30)(1, 0, 1, 0)
seen["graph"] = [cuda.cuGraphCreate(ctypes.byref(graph), 0), cuda.cuGraphAddMemAllocNode(ctypes.byref(again), graph, None, 0, properties)]
seen["null"] = call("cuMemcpyDtoH_v2", ctypes.c_void_p(), large, 4)
seen["beyond"] = read(large + int(sys.argv[1]) * MIB - 3)[0]
child = os.fork()
if child == 0:
    # CUDA does not work here, but a call returns.
    call("cuMemFree_v2", large)
    os._exit(7)
seen["child"] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
seen["freed"] = [call("cuMemFree_v2", address) for address in (large, small, table, large)], info()[0]
print(json.dumps(seen))
