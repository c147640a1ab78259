#!/usr/bin/env python3
"""Compares what `gpumem export` says of a GPU and of a running program with what nvidia-smi and the program say.

    cargo build --release -p gpumem-cli
    python crates/cli/proof/export.py target/release/gpumem

It needs an NVIDIA GPU and PyTorch. A line PASS or FAIL is printed for each comparison; the exit code is 1 if one failed.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request

MIB = 1 << 20
BASE = 256 * MIB
PORT = 19837
# Each allocation is one of the driver. A spike is over before the next scrape.
PROGRAM = """
import os, sys, time, torch
base = torch.empty(%d, dtype=torch.uint8, device="cuda")
print(os.getpid(), flush=True)
for line in sys.stdin:
    began = time.perf_counter()
    spike = torch.empty(int(line), dtype=torch.uint8, device="cuda")
    del spike
    print((time.perf_counter() - began) * 1e3, flush=True)
""" % BASE


def scrape(scraper):
    began = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/metrics?scraper={scraper}", timeout=30) as answer:
        text = answer.read().decode()
    scrape.times.append(time.perf_counter() - began)
    samples = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", text, re.M)
    return [(name, dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value)) for name, labels, value in samples]


scrape.times = []


def value(samples, name, **labels):
    found = [number for of, has, number in samples if of == name and labels.items() <= has.items()]
    return found[0] if len(found) == 1 else None


def smi(query):
    return subprocess.run(["nvidia-smi", *query, "--format=csv,noheader,nounits"], capture_output=True, text=True).stdout.strip()


def main():
    gpumem = os.path.abspath(sys.argv[1])
    failed = []

    def compare(what, is_right, detail):
        print("PASS" if is_right else "FAIL", what, detail, flush=True)
        failed.extend([] if is_right else [what])

    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        command = [gpumem, "run", "--live", "-o", "live.capture", "--", sys.executable, "-c", PROGRAM]
        program = subprocess.Popen(command, cwd=folder, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        exporter = subprocess.Popen([gpumem, "export", "--listen", f"127.0.0.1:{PORT}"], cwd=folder)
        try:
            pid = program.stdout.readline().strip()
            time.sleep(3)
            scrape("a")
            sizes, spent = [(3 + number) * 512 * MIB for number in range(8)], []
            for size in sizes:
                program.stdin.write(f"{size}\n")
                program.stdin.flush()
                spent.append(float(program.stdout.readline()))
                time.sleep(0.5)
                first, second = scrape("a"), scrape("a")
                peak = value(first, "gpumem_process_interval_peak_bytes", process_pid=pid)
                after = value(second, "gpumem_process_interval_peak_bytes", process_pid=pid)
                compare("the peak between two scrapes", (peak, after) == (BASE + size, BASE), f"{peak} and then {after}, {BASE + size} and {BASE} expected")
            print("INFO a spike took, in ms", [round(ms, 2) for ms in spent])
            other = scrape("b")
            peak = value(other, "gpumem_process_interval_peak_bytes", process_pid=pid)
            compare("another scraper has the highest", peak == BASE + max(sizes), peak)
            compare("the peak since the start", value(other, "gpumem_process_peak_bytes", process_pid=pid) == BASE + max(sizes), "")
            live = sum(number for name, has, number in other if name == "gpumem_process_live_bytes" and has.get("process_pid") == pid)
            compare("live", live == BASE, live)
            lost = value(other, "gpumem_process_lost_total", process_pid=pid)
            compare("nothing was lost", lost == 0, lost)
            total, used = (int(number) for number in smi(["--id=0", "--query-gpu=memory.total,memory.used"]).split(","))
            limit, usage = (value(other, f"hw_gpu_memory_{name}_bytes", hw_id="0") for name in ("limit", "usage"))
            compare("the GPU as nvidia-smi", abs(limit / MIB - total) < 2 and abs(usage / MIB - used) < 2, f"{limit / MIB} and {total}, {usage / MIB} and {used}")
            of_process = dict(line.split(", ") for line in smi(["--query-compute-apps=pid,used_memory"]).splitlines())
            usage = value(other, "gpumem_process_usage_bytes", process_pid=pid)
            compare("the process as nvidia-smi", usage is not None and abs(usage / MIB - float(of_process.get(pid, -1))) < 2, f"{usage} and {of_process}")
            times = sorted(scrape.times)
            print(f"INFO {len(times)} scrapes: median {times[len(times) // 2] * 1e3:.1f} ms, most {times[-1] * 1e3:.1f} ms; {len(other)} series")
        finally:
            program.stdin.close()
            program.wait(60)
            exporter.terminate()
            exporter.wait(60)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
