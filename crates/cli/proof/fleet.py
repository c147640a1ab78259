#!/usr/bin/env python3
"""Measures `gpumem export` while 64 recorded programs run, each on 8 GPUs of the stand-in driver.

    cargo build --release -p gpumem-cli -p gpumem-standin
    python crates/cli/proof/fleet.py target/release/gpumem target/release/libgpumem_standin.so

It needs 16 processors, 4 GB of memory and no GPU, and takes about a minute. The row is PASS if the live bytes are right, nothing was lost,
and each scrape took less than a second.
"""

import os
import re
import shutil
import subprocess
import sys
import time

from export import Exporter
from harness import MIB, Failed, main

PROCESSES, GPUS, PLACES, SCRAPES = 64, 8, 12, 40
# A program on 8 GPUs: 12 places on each, and then 100 pairs of events per second, with an occasional spike of 64 MiB on each GPU.
START = """
import ctypes, os, sys, time

cuda = ctypes.CDLL("libcuda.so.1")


def done(result):
    if result:
        raise SystemExit(f"the driver says {result}")
"""
# Each place is a separate line.
PLACE = """

def layer_%d(size):
    address = ctypes.c_uint64()
    done(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))
    return address
"""
LOOP = """

MIB = 1 << 20
done(cuda.cuInit(0))
contexts = [ctypes.c_void_p() for _ in range(8)]
for device, context in enumerate(contexts):
    done(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    done(cuda.cuCtxSetCurrent(context))
    for number in range(12):
        globals()[f"layer_{number}"]((1 + number) * MIB)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, sys.argv[1])
turn = 0
while True:
    done(cuda.cuCtxSetCurrent(contexts[turn % 8]))
    for _ in range(10):
        done(cuda.cuMemFree_v2(layer_3(2 * MIB)))
    if turn % 64 < 8:
        done(cuda.cuMemFree_v2(layer_4(64 * MIB)))
    turn += 1
    time.sleep(0.1)
"""


def fleet(proof):
    folder, started = proof.folder, []
    driver = os.path.join(folder, "driver")
    os.mkdir(driver)
    # Processes that use the driver are recognised by the names of the files that they have loaded.
    shutil.copy(proof.arguments.standin, f"{driver}/libcuda.so.standin")
    for name in ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so", "libnvidia-ml.so.1"):
        os.symlink(f"{driver}/libcuda.so.standin", f"{driver}/{name}")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMEM", "CUDA_", "LD_"))}
    env.update(LD_LIBRARY_PATH=driver, GPUMEM_STANDIN=f"devices={GPUS},context=1MiB", XDG_CACHE_HOME=f"{folder}/cache", XDG_RUNTIME_DIR=folder)
    more = {"cwd": folder, "start_new_session": True}
    try:
        for number in range(PROCESSES):
            with open(f"{folder}/program_{number}.py", "w") as file:
                file.write(START + "".join(PLACE % number for number in range(PLACES)) + LOOP)
            command = [*proof.recording("--live")[0], sys.executable, file.name, f"{folder}/ready_{number}"]
            with open(f"{folder}/log_{number}", "w") as log:
                started.append(subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **more))
        env["GPUMEM_STANDIN"] += "".join(f",compute={pid}:80MiB:python" for pid in pids(folder))
        exporter = Exporter(proof.gpumem, 19838, env=env, **more)
        started.append(exporter.process)
        yield from measured(exporter)
    finally:
        for process in started:
            try:
                os.killpg(process.pid, 9)
            except ProcessLookupError:
                pass
        for process in started:
            process.wait()


def pids(folder):
    """Waits until all programs are ready, and returns their process ids."""
    files = [f"{folder}/ready_{number}" for number in range(PROCESSES)]
    for _ in range(600):
        if all(map(os.path.exists, files)):
            return [open(file).read() for file in files]
        time.sleep(0.1)
    raise Failed("the programs do not start: " + open(f"{folder}/log_0").read())


def measured(exporter):
    time.sleep(10)
    exporter.scrape("a")
    exporter.seconds.clear()
    for _ in range(SCRAPES):
        exporter.scrape("a")
        time.sleep(max(0, 1 - exporter.seconds[-1]))
    processes = {labels["process_pid"] for name, labels, _ in exporter.samples if name == "gpumem_process_peak_bytes"}
    lost = [name for name, _, value in exporter.samples if name in ("gpumem_process_lost_total", "gpumem_exporter_hidden") and value]
    live = set(exporter.values("gpumem_process_live_bytes"))
    steady = sum(1 + number for number in range(PLACES)) * MIB
    is_right = live <= {steady, steady + 2 * MIB, steady + 64 * MIB} and len(processes) == PROCESSES and not lost
    with open(f"/proc/{exporter.process.pid}/status") as file:
        most = int(re.search(r"VmHWM:\s+(\d+) kB", file.read())[1]) >> 10
    values = {"processes": len(processes), "processors": os.cpu_count(), "load": os.getloadavg()[0], "most MiB": most}
    yield is_right and max(exporter.seconds) < 1, "fleet", {**exporter.costs(), **values, "live": sorted(live), "lost": lost[:5]}


if __name__ == "__main__":
    main(__doc__, {"fleet": fleet}, {"standin": {"help": "the library of the stand-in driver"}})
