# A program that asks NVML before it initialises CUDA. It prints what it saw.
import ctypes
import json
import subprocess
import sys

MIB = 1 << 20
nvml = ctypes.CDLL("libnvidia-ml.so.1")
word, number, handle = ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p
by_ref = ctypes.byref


def at(index):
    found = handle()
    code = nvml.nvmlDeviceGetHandleByIndex_v2(index, by_ref(found))
    return found if code == 0 else code


def first(device):
    figures = (word * 3)()
    code = nvml.nvmlDeviceGetMemoryInfo(device, figures)
    return [figure // MIB for figure in figures] if code == 0 else code


def second(device):
    figures = (word * 5)(0x02000028)
    code = nvml.nvmlDeviceGetMemoryInfo_v2(device, figures)
    return [figure // MIB for figure in figures[1:]] if code == 0 else code


def text(function, device):
    buffer = ctypes.create_string_buffer(96)
    return buffer.value.decode() if getattr(nvml, function)(device, buffer, 96) == 0 else None


def found(function, by):
    device = handle()
    code = getattr(nvml, function)(by.encode(), by_ref(device))
    return device.value if code == 0 else code


def child():
    return json.loads(subprocess.check_output([sys.executable, __file__, "child"], text=True))


seen = {"uninitialised": [nvml.nvmlDeviceGetCount_v2(by_ref(number())), at(0)]}
assert nvml.nvmlInit_v2() == 0
count = number()
assert nvml.nvmlDeviceGetCount_v2(by_ref(count)) == 0
seen["count"] = count.value
devices = [at(index) for index in range(count.value)]
if sys.argv[1:] == ["child"]:
    print(json.dumps([second(device) for device in devices]))
    sys.exit()
seen["before"] = [[first(device), second(device)] for device in devices]

from standin_cuda import alloc, call, cuda, enter, info

assert call("cuInit", 0) == 0
seen["cuInit"] = second(devices[0])
used = int(sys.argv[1])
context = enter(used)
assert alloc(1000)[0] == 0
seen["cuda"] = info()
seen["after"] = [[first(device), second(device)] for device in devices]
seen["child"] = child()
mode = number(7)
seen["others"] = [[text("nvmlDeviceGetName", device), nvml.nvmlDeviceGetMigMode(device, by_ref(mode), by_ref(mode))] for device in devices]
seen["error"] = nvml.nvmlDeviceGetMemoryInfo_v2(devices[0], (word * 5)(7))
if len(sys.argv) > 2:
    # Several cards: NVML has CUDA's names.
    uuids, buses, domains, indexes, same = [], [], [], [], []
    for card, device in enumerate(devices):
        uuid, bus, info, index = ctypes.create_string_buffer(16), ctypes.create_string_buffer(32), ctypes.create_string_buffer(68), number()
        assert call("cuDeviceGetUuid_v2", uuid, card) == 0 and call("cuDeviceGetPCIBusId", bus, 32, card) == 0
        assert nvml.nvmlDeviceGetPciInfo_v3(device, info) == 0 and nvml.nvmlDeviceGetIndex(device, by_ref(index)) == 0
        name, long = text("nvmlDeviceGetUUID", device), info.raw[36:].split(b"\0")[0].decode()
        uuids.append(name.replace("-", "") == "GPU" + uuid.raw.hex())
        buses.append(info.value == bus.value and long == "0000" + bus.value.decode())
        domains.append(int.from_bytes(info.raw[16:20], "little"))
        indexes.append(index.value)
        names = [("nvmlDeviceGetHandleByUUID", name), *(("nvmlDeviceGetHandleByPciBusId_v2", text) for text in (bus.value.decode(), long))]
        same.append([found(*name) == device.value for name in names])
    seen["names"] = uuids, buses, domains, indexes, same, len({device.value for device in devices})
    seen["no card"] = at(count.value), found("nvmlDeviceGetHandleByUUID", "GPU-0"), found("nvmlDeviceGetHandleByPciBusId_v2", "0009:01:00.0")
print(json.dumps(seen))
