#!/usr/bin/env python3
"""Measures `gpumem export` beside 64 recorded programs, each on 8 GPUs of the stand-in driver.

    cargo build --release -p gpumem-cli -p gpumem-standin
    python crates/cli/proof/fleet.py target/release/gpumem target/release/libgpumem_standin.so

It needs 16 processors, 4 GB of memory and no GPU, and takes about 100 s. The last line says PASS or FAIL: whether the live bytes are
right, nothing was lost, and each scrape took less than a second.
"""

import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

PROCESSES, GPUS = 64, 8
gpumem, standin = map(os.path.abspath, sys.argv[1:])
# A program on 8 GPUs: 12 places on each, and then 100 pairs of events a second, with a spike of 64 MiB for each GPU now and then.
PROGRAM = r"""
import ctypes, sys, time

MIB = 1 << 20
number = int(sys.argv[1])
cuda = ctypes.CDLL("libcuda.so.1")


def done(result):
    if result:
        raise SystemExit(f"the driver says {result}")


# Each place is a line of its own.
PLACES = "".join(
    f"def layer_{n}(size):\n"
    "    address = ctypes.c_uint64()\n"
    "    done(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)))\n"
    "    return address\n\n"
    for n in range(12)
)
open(f"layers_{number}.py", "w").write(PLACES)
scope = {"ctypes": ctypes, "cuda": cuda, "done": done}
exec(compile(PLACES, f"{sys.path[0]}/layers_{number}.py", "exec"), scope)
done(cuda.cuInit(0))
contexts = []
for device in range(8):
    context = ctypes.c_void_p()
    done(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    done(cuda.cuCtxSetCurrent(context))
    contexts.append(context)
    for n in range(12):
        scope[f"layer_{n}"]((1 + n) * MIB)
open(f"ready_{number}", "w").close()
turn = 0
while True:
    done(cuda.cuCtxSetCurrent(contexts[turn % 8]))
    for _ in range(10):
        done(cuda.cuMemFree_v2(scope["layer_3"](2 * MIB)))
    if turn % 64 < 8:
        done(cuda.cuMemFree_v2(scope["layer_4"](64 * MIB)))
    turn += 1
    time.sleep(0.1)
"""
folder = tempfile.mkdtemp(prefix="gpumem-fleet-")
driver = f"{folder}/driver"
os.mkdir(driver)
# Processes that use the driver are known by the names of the files that they have loaded.
shutil.copy(standin, f"{driver}/libcuda.so.standin")
for name in ("libcuda.so", "libcuda.so.1", "libnvidia-ml.so", "libnvidia-ml.so.1"):
    os.symlink(f"{driver}/libcuda.so.standin", f"{driver}/{name}")
env = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMEM", "CUDA_", "LD_"))}
env.update(LD_LIBRARY_PATH=driver, GPUMEM_STANDIN=f"devices={GPUS},context=1MiB", XDG_CACHE_HOME=f"{folder}/cache", XDG_RUNTIME_DIR=folder)
with open(f"{folder}/program.py", "w") as file:
    file.write(PROGRAM)
started = []


def start(command, **more):
    started.append(subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, start_new_session=True, **more))
    return started[-1]


def processor_time(pid):
    fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid):
    text = open(f"/proc/{pid}/status").read()
    return [int(re.search(rf"{name}:\s+(\d+) kB", text)[1]) >> 10 for name in ("VmRSS", "VmHWM")]


def main():
    for number in range(PROCESSES):
        out = open(f"{folder}/log_{number}", "w")
        program = [sys.executable, "program.py", str(number)]
        start([gpumem, "run", "--live", "-o", f"{folder}/run_{number}.capture", "--", *program], env=env, stdout=out, stderr=out)
    for _ in range(600):
        if all(os.path.exists(f"{folder}/ready_{number}") for number in range(PROCESSES)):
            break
        time.sleep(0.1)
    else:
        sys.exit("FAIL: the programs do not start: " + open(f"{folder}/log_0").read())
    pids = subprocess.run(["pgrep", "-f", "^[^ ]*python[^ ]* program.py"], capture_output=True, text=True).stdout.split()
    of_driver = ",".join(f"compute={pid}:80MiB:python" for pid in pids)
    exporter = start([gpumem, "export", "--listen", "127.0.0.1:19838"], env=dict(env, GPUMEM_STANDIN=f"{env['GPUMEM_STANDIN']},{of_driver}"))

    def scrape():
        began = time.perf_counter()
        with urllib.request.urlopen("http://127.0.0.1:19838/metrics?scraper=a", timeout=60) as answer:
            text = answer.read()
        return time.perf_counter() - began, text

    time.sleep(10)
    began, used = time.perf_counter(), processor_time(exporter.pid)
    time.sleep(20)
    idle = (processor_time(exporter.pid) - used) / (time.perf_counter() - began)
    scrape()
    walls, began, used = [], time.perf_counter(), processor_time(exporter.pid)
    while time.perf_counter() - began < 40:
        wall, text = scrape()
        walls.append(wall)
        time.sleep(max(0, 1 - wall))
    spent = processor_time(exporter.pid) - used
    processor = (spent - idle * (time.perf_counter() - began)) / len(walls)
    lines = [line for line in text.decode().splitlines() if not line.startswith("#")]
    of_processes = {re.search(r'process_pid="(\d+)"', line)[1] for line in lines if line.startswith("gpumem_process_peak_bytes")}
    lost = [line for line in lines if line.startswith(("gpumem_process_lost_total", "gpumem_exporter_hidden")) and not line.endswith(" 0")]
    live = {float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("gpumem_process_live_bytes")}
    resident, most = memory(exporter.pid)
    print(f"{len(of_processes)} recorded processes, {GPUS} GPUs, {os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")
    median, most_wall = statistics.median(walls) * 1e3, max(walls) * 1e3
    print(f"{len(walls)} scrapes: median {median:.1f} ms, most {most_wall:.1f} ms, processor {processor * 1e3:.1f} ms each")
    print(f"between scrapes: {idle * 100:.1f} % of a processor")
    print(f"memory {resident} MiB, most {most} MiB; {len(lines)} series, {len(text)} bytes")
    spike = 64 << 20
    steady = sum(1 + n for n in range(12)) << 20
    is_right = live <= {steady, steady + (2 << 20), steady + spike} and len(of_processes) == PROCESSES and not lost
    print("PASS" if is_right and max(walls) < 1 else "FAIL", f"live {sorted(live)}, {lost[:5]}")


try:
    main()
finally:
    for process in started:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
    for process in started:
        process.wait()
    time.sleep(1)
    shutil.rmtree(folder, ignore_errors=True)
