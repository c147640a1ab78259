# A program that uses several cards. It prints what it saw.
import ctypes
import json
import time

from standin_cuda import MIB, alloc, call, cuda, enter, info, launch, word

number = ctypes.c_int32
seen = {}
assert call("cuInit", 0) == 0
count = number()
assert call("cuDeviceGetCount", count) == 0
uuids, buses, found, domains = set(), [], [], []
for device in range(count.value):
    uuid, bus, again, domain = ctypes.create_string_buffer(16), ctypes.create_string_buffer(16), number(), number()
    assert call("cuDeviceGetUuid_v2", uuid, device) == 0 and call("cuDeviceGetPCIBusId", bus, 16, device) == 0
    assert call("cuDeviceGetByPCIBusId", again, bus) == 0 and call("cuDeviceGetAttribute", domain, 50, device) == 0
    uuids.add(uuid.raw)
    buses.append(bus.value.decode())
    found.append(again.value)
    domains.append(domain.value)
seen["cards"] = count.value, len(uuids), buses, found, domains
seen["no card"] = call("cuDeviceGet", number(), count.value), call("cuDeviceTotalMem_v2", word(), count.value)
active, flags = number(), number()
state = lambda device: (call("cuDevicePrimaryCtxGetState", device, flags, active), active.value)[1]
before = [state(device) for device in range(count.value)]
contexts = [enter(device) for device in range(count.value)]
seen["state"] = before, [state(device) for device in range(count.value)], enter(2).value == contexts[2].value


def on(device):
    assert cuda.cuCtxSetCurrent(contexts[device]) == 0


def free():
    all = []
    for device in range(count.value):
        on(device)
        assert call("cuCtxGetDevice", active) == 0 and active.value == device
        all.append(info()[0])
    return all


seen["free"] = free()
on(3)
_, large = alloc(20000)
seen["refused"] = alloc(20000)[0]
_, small = alloc(1)
on(1)
seen["other card"] = alloc(20000)[0]
seen["after"] = free()
ordinal = lambda address: (call("cuPointerGetAttribute", active, 9, address), active.value)
seen["ordinals"] = ordinal(large), ordinal(small)
on(1)
seen["launch"] = launch(small), alloc(1)[0]
on(3)
# A skipped launch may have written there.
call("cuMemcpyHtoD_v2", small, ctypes.create_string_buffer(16), 16)
seen["launch on its card"] = launch(small)
can = lambda one, other: (call("cuDeviceCanAccessPeer", active, one, other), active.value)
seen["peers"] = can(0, 3), can(2, 2), can(0, 4)[0]
seen["enable"] = [call(name, contexts[1], *rest) for name, *rest in [("cuCtxEnablePeerAccess", 0)] * 2 + [("cuCtxDisablePeerAccess",)] * 2]

def active_at_end(device):
    """gpumem reads the free memory of a card in its context, so for a moment it may be the last that holds it."""
    for _ in range(100):
        if not state(device):
            return 0
        time.sleep(0.02)
    return 1


# Physical memory, and a pool, of a card that is not the current one.
created = []
for device in (2, 4):
    properties = (ctypes.c_int32 * 8)(1, 0, 1, device)
    created.append([call("cuMemCreate", word(), mib * MIB, ctypes.cast(properties, ctypes.c_void_p), 0) for mib in (2, 20)])
seen["create"] = created
pools = [word(), word()]
seen["pools"] = [call("cuDeviceGetDefaultMemPool", pool, device) for pool, device in zip(pools, (0, 2))], pools[0].value != pools[1].value
seen["pooled"] = call("cuMemAllocFromPoolAsync", word(), 64 * MIB, pools[1].value, 0)
seen["of a pool"] = free()
released = []
for device in (3, 2, 2):
    released.append(call("cuDevicePrimaryCtxRelease_v2", device))
active_at_end(2)
released.append(call("cuDevicePrimaryCtxRelease_v2", 2))
seen["release"] = released, [active_at_end(device) if device > 1 else state(device) for device in range(count.value)]
on(0)
seen["reset"] = call("cuDevicePrimaryCtxReset_v2", 1), state(1), call("cuDevicePrimaryCtxReset_v2", 4)
seen["again"] = (enter(3), info()[0])[1]
print(json.dumps(seen))
