# A program that copies from and to a dry block, with addresses and sizes that are right and wrong. It prints the result of each copy.
import ctypes
import json

from standin_cuda import MIB, alloc, call, enter, word

HOST, DEVICE, UNIFIED = 1, 2, 4
LARGE = 100 * MIB

assert call("cuInit", 0) == 0
enter(0)
[large, small, freed] = [alloc(mib)[1] for mib in (100, 1, 100)]
call("cuMemFree_v2", freed)
buffer = ctypes.create_string_buffer(b"\x11" * 64, 64)
host = ctypes.addressof(buffer)
nowhere = 1 << 12
end = large + LARGE - 4


def rows(to, source, width=4, height=2, depth=0, pitch=16):
    """Copies rows; `depth` is a 3D copy's depth. A side is its sort and its address."""
    sort = lambda side: [side[0], side[1] if side[0] == HOST else 0, side[1] if side[0] != HOST else 0, 0]
    if depth:
        words = [0, 0, 0, 0, *sort(source), 0, pitch, height, 0, 0, 0, 0, *sort(to), 0, pitch, height, width, height, depth]
        name = "cuMemcpy3D_v2"
    else:
        words = [0, 0, *sort(source), pitch, 0, 0, *sort(to), pitch, width, height]
        name = "cuMemcpy2D_v2"
    return call(name, ctypes.cast((word * len(words))(*words), ctypes.c_void_p))


def batch(*copies):
    lists = [ctypes.cast((word * len(copies))(*values), ctypes.c_void_p) for values in zip(*copies)]
    return call("cuMemcpyBatchAsync_v2", *lists, len(copies), 0, 0, 0, 0)


def filled(copy):
    """The result of a copy, and what is in the first bytes of the buffer after it."""
    ctypes.memset(host, 0x11, 64)
    return copy(), buffer.raw[:40].hex()


seen = {
    "from the host": {
        "right": call("cuMemcpyHtoD_v2", large, host, 8),
        "beyond": call("cuMemcpyHtoD_v2", end, host, 8),
        "from a dry block": [call("cuMemcpyHtoD_v2", to, large, 8) for to in (large, small)],
        "from real memory": [call("cuMemcpyHtoD_v2", to, small, 8) for to in (large, small)],
        "from a freed block": [call("cuMemcpyHtoD_v2", to, freed, 8) for to in (large, small)],
        "from nowhere": [call("cuMemcpyHtoD_v2", to, nowhere, 8) for to in (large, small)],
        "from null": call("cuMemcpyHtoD_v2", large, 0, 8),
        "nothing": call("cuMemcpyHtoD_v2", large, 0, 0),
    },
    "to the host": {
        "right": filled(lambda: call("cuMemcpyDtoH_v2", host, end, 4)),
        "beyond": filled(lambda: call("cuMemcpyDtoH_v2", host, end, 8)),
        "to a dry block": call("cuMemcpyDtoH_v2", large, large, 8),
        "to real memory": call("cuMemcpyDtoH_v2", small, large, 8),
        "to a freed block": [call("cuMemcpyDtoH_v2", freed, source, 8) for source in (large, small)],
        "to nowhere": call("cuMemcpyDtoH_v2", nowhere, large, 8),
        "to the last address": call("cuMemcpyDtoH_v2", 2**64 - 4, large, 8),
        "nothing": call("cuMemcpyDtoH_v2", 0, large, 0),
    },
    "on the device": {
        "right": [call("cuMemcpyDtoD_v2", large, small, 8), call("cuMemcpyDtoD_v2", small, large, 8)],
        "beyond": [call("cuMemcpyDtoD_v2", end, small, 8), call("cuMemcpyDtoD_v2", large, small, MIB + 1)],
        "from the host": call("cuMemcpyDtoD_v2", large, host, 8),
        "from a freed block": call("cuMemcpyDtoD_v2", large, freed, 8),
        "between cards": [call("cuMemcpyPeer", large, 0, small, 0, bytes) for bytes in (8, MIB + 1)],
    },
    "anywhere": {
        "to the host": filled(lambda: call("cuMemcpy", host, large, 8)),
        "from the host": call("cuMemcpy", large, host, 8),
        "to nowhere": call("cuMemcpy", nowhere, large, 8),
        "to a freed block": call("cuMemcpy", freed, large, 8),
        "beyond": call("cuMemcpy", host, end, 8),
        "of many": filled(lambda: batch((host, large, 4), (large, host, 4), (host + 8, large, 4))),
        "of many, to a freed block": batch((host, large, 4), (freed, large, 4)),
    },
    "rows": {
        "to the host": filled(lambda: rows((HOST, host), (DEVICE, large))),
        "planes to the host": filled(lambda: rows((HOST, host), (DEVICE, large), height=1, depth=2)),
        "to unified addresses": filled(lambda: rows((UNIFIED, host), (UNIFIED, large))),
        "from the host": rows((DEVICE, large), (HOST, host)),
        "to null": rows((HOST, 0), (DEVICE, large)),
        "to a dry block": rows((HOST, large), (DEVICE, large)),
        "to a freed block": [rows((sort, freed), (DEVICE, large)) for sort in (HOST, DEVICE, UNIFIED)],
        "that overlap": filled(lambda: rows((HOST, host), (DEVICE, large), pitch=2)),
        "beyond": rows((HOST, host), (DEVICE, end)),
        "beyond all addresses": rows((HOST, host), (DEVICE, large), height=2**61),
        "none": rows((HOST, 0), (DEVICE, large), height=0),
    },
}
print(json.dumps(seen))
