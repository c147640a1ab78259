# A program of a dry run that reads values which are not computed. It prints what it saw.
import ctypes
import json

from standin_cuda import alloc, call, cuda, enter, launch, launched, read, word


def join(*addresses):
    """Launches a kernel of PyTorch that writes to the first address and reads the others. No value can end the program."""
    return launched(1000, len(addresses), [(word * 128)(*addresses)])


def text(content):
    return ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p)


assert call("cuInit", 0) == 0
enter(0)
large = alloc(100)[1]
written, copied, computed, known = [alloc(1)[1] for _ in range(4)]
seen = {"before": read(written)}
seen["skipped"] = launch(large, written)
host = ctypes.create_string_buffer(4)
# Unknown: the skipped kernel may have written it.
cuda.cuMemcpyDtoH_v2(host, word(written), word(4))
call("cuMemcpyDtoD_v2", copied, written, 8)
cuda.cuMemcpyDtoH_v2(host, word(copied), word(4))
seen["indices"] = launch(copied)
seen["computed"] = join(computed, written)
cuda.cuMemcpyDtoH_v2(host, word(computed), word(4))
for _ in range(3):
    cuda.cuMemcpyDtoH_v2(host, word(large), word(4))
call("cuMemcpyHtoD_v2", written, ctypes.cast(ctypes.create_string_buffer(8), ctypes.c_void_p), 8)
seen["overwritten"] = launch(written), read(written), read(known)

# Unknown: a part of what is read was not written.
launch(large, known + 4096)
cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(8192), word(known), word(8192))
seen["before it"] = read(known)

# PyTorch computes a table of addresses. A kernel that would read through it is skipped, and the memory can be used again.
table = alloc(1)[1]
seen["table"] = [launched(1001, 1, [word(large), word(table)]), launch(table), launched(1001, 1, [word(5), word(table)]), launch(table)]

# The kernel of a library is loaded when it is launched, and its threads need local memory.
library, kernel = word(), word()
call("cuLibraryLoadData", library, text(b"module:6291456/deep1:0:8192/deep0:0:4096"), 0, 0, 0, 0, 0, 0)
call("cuLibraryGetKernel", kernel, library.value, text(b"deep1"))
seen["kernel"] = launched(kernel.value, 1, [word(large)])
# This one is executed, and takes less than is recorded already.
call("cuLibraryGetKernel", kernel, library.value, text(b"deep0"))
seen["other kernel"] = launched(kernel.value, 1, [])

# The host gets zeros instead of a result that a skipped kernel should have written as a whole, also through copies and reductions.
missing = alloc(1)[1]
seen["missing"] = [launched(1002, 1, [word(large), word(missing)])]
call("cuMemcpyDtoD_v2", copied, missing, 8)
seen["missing"].append(launched(1003, 1, [(word * 128)(missing, computed)]))
for address in missing, copied, computed:
    cuda.cuMemcpyDtoH_v2(host, word(address), word(4))
    seen["missing"].append(host.raw.hex())
seen["beyond it"] = cuda.cuMemcpyDtoH_v2(ctypes.create_string_buffer(2 << 20), word(missing), word(2 << 20))
# A part of what is read is known.
call("cuMemcpyHtoD_v2", missing, text(b"ab"), 2)
cuda.cuMemcpyDtoH_v2(host, word(missing), word(4))
seen["missing"].append(host.raw.hex())

# A skipped kernel should have written addresses: a kernel that reads them is skipped.
addresses = alloc(1)[1]
seen["addresses"] = [launched(1004, 1, [word(addresses), word(large)]), launch(addresses)]

# A kernel gets a table of addresses in pinned memory.
pinned = word()
call("cuMemHostAlloc", pinned, 4096, 0)
first = word.from_address(pinned.value)
seen["pinned"] = []
for first.value in large, written, 5:
    seen["pinned"].append(launch(pinned.value))
first.value = large
seen["pinned"].append(launch(pinned.value + 4096))
call("cuMemFreeHost", pinned.value)
seen["pinned"].append(launch(pinned.value))
print(json.dumps(seen))
