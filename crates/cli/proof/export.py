#!/usr/bin/env python3
"""Compares the values of `gpumem export` for a GPU and a running program with nvidia-smi's and the program's.

    cargo build --release -p gpumem-cli
    python crates/cli/proof/export.py target/release/gpumem

It needs an NVIDIA GPU, nvidia-smi and PyTorch.
"""

import os
import re
import statistics
import subprocess
import time
import urllib.request

from harness import MIB, main, program, smi

BASE = 256 * MIB


class Exporter:
    """A running `gpumem export`, and the metrics that scrapers get from it."""

    def __init__(self, gpumem, port, **more):
        self.address, self.seconds = f"127.0.0.1:{port}", []
        self.process = subprocess.Popen([gpumem, "export", "--listen", self.address], stdin=subprocess.DEVNULL, **more)

    def scrape(self, scraper):
        began = time.perf_counter()
        with urllib.request.urlopen(f"http://{self.address}/metrics?scraper={scraper}", timeout=60) as answer:
            self.text = answer.read().decode()
        self.seconds.append(time.perf_counter() - began)
        samples = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", self.text, re.M)
        self.samples = [(name, dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)), float(value)) for name, labels, value in samples]
        return self.samples

    def values(self, name, **labels):
        return [value for other, has, value in self.samples if other == name and labels.items() <= has.items()]

    def costs(self):
        """Returns the milliseconds that scrapes took, and the size of the last answer."""
        median, most = statistics.median(self.seconds) * 1e3, max(self.seconds) * 1e3
        times = {"scrapes": len(self.seconds), "median": round(median, 1), "most": round(most, 1)}
        return {**times, "series": len(self.samples), "bytes": len(self.text)}


def spikes(proof):
    # PyTorch gets each allocation from the driver.
    env = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    ran, _ = proof.start(program("spikes", base=BASE), "--live", env=env)
    exporter = Exporter(proof.gpumem, 19837)
    try:
        yield from compared(exporter, ran)
    finally:
        ran.communicate("", 60)
        exporter.process.terminate()
        exporter.process.wait(60)


def compared(exporter, ran):
    pid = ran.stdout.readline().strip()
    values = lambda name: exporter.values(f"gpumem_process_{name}", process_pid=pid)
    time.sleep(3)
    exporter.scrape("a")
    sizes, spent = [(3 + number) * 512 * MIB for number in range(8)], []
    for size in sizes:
        # A spike is over before the next scrape.
        ran.stdin.write(f"{size}\n")
        ran.stdin.flush()
        spent.append(round(float(ran.stdout.readline()), 2))
        time.sleep(0.5)
        peaks = [exporter.scrape("a") and values("interval_peak_bytes") for _ in range(2)]
        yield peaks == [[BASE + size], [BASE]], "the peak between two scrapes", {"peaks": peaks, "base": BASE, "spike": size}
    exporter.scrape("b")
    of_process = {int(pid): int(used) for pid, used in smi("compute-apps=pid,used_memory") if used.isdigit()}
    total, used = map(int, smi("gpu=memory.total,memory.used")[0])
    for name, found, expected in (
        ("another scraper has the highest peak", values("interval_peak_bytes"), [BASE + max(sizes)]),
        ("the peak since the start", values("peak_bytes"), [BASE + max(sizes)]),
        ("live", sum(values("live_bytes")), BASE),
        ("nothing was lost", values("lost_total"), [0]),
    ):
        yield found == expected, name, {"exported": found, "expected": expected}
    for name, found, expected in (
        ("the GPU's memory as nvidia-smi", exporter.values("hw_gpu_memory_limit_bytes", hw_id="0"), total),
        ("the GPU's used memory as nvidia-smi", exporter.values("hw_gpu_memory_usage_bytes", hw_id="0"), used),
        ("the process as nvidia-smi", values("usage_bytes"), of_process.get(int(pid), -1)),
    ):
        yield len(found) == 1 and abs(found[0] / MIB - expected) < 2, name, {"exported": found, "expected": expected}
    yield "INFO", "costs", {**exporter.costs(), "milliseconds of spikes": spent}


if __name__ == "__main__":
    main(__doc__, {"spikes": spikes})
