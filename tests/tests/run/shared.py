# Processes on one card. The program prints what they saw.
import json
import os
import signal
import subprocess
import sys

from standin_cuda import alloc, call, enter, info

assert call("cuInit", 0) == 0
enter(0)
if len(sys.argv) > 1 and sys.argv[1] != "numbers":
    # A process that allocates, and waits until it is killed.
    print(json.dumps([info(), alloc(int(sys.argv[1]))[0], info()[0]]), flush=True)
    signal.pause()


def begin(mib, **variables):
    environment = {**os.environ, **variables}
    process = subprocess.Popen([sys.executable, __file__, str(mib)], stdout=subprocess.PIPE, text=True, env=environment)
    return process, json.loads(process.stdout.readline())


if len(sys.argv) > 1:
    # The machine has two devices, which other processes number differently. The context counts when memory is asked for.
    info()
    processes, seen = zip(*[begin(500, CUDA_VISIBLE_DEVICES=devices) for devices in ("1", "1,0", "0")])
    print(json.dumps([*seen, info()]))
    for process in processes:
        process.kill()
        process.wait()
    sys.exit()

seen = {"alone": info()}
one, seen["one"] = begin(500)
two, seen["two"] = begin(500)
seen["three"] = info()[0], alloc(100)[0]
one.kill()
seen["killed"] = one.wait(), alloc(100)[0], info()[0]
two.kill()
two.wait()
seen["alone again"] = info()[0]
print(json.dumps(seen))
