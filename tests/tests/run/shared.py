# Processes on one card. The program prints what they saw.
import json
import signal
import subprocess
import sys

from standin_cuda import alloc, call, enter, info

assert call("cuInit", 0) == 0
enter(0)
if len(sys.argv) > 1:
    # A process that allocates, and waits until it is killed.
    print(json.dumps([info(), alloc(int(sys.argv[1]))[0], info()[0]]), flush=True)
    signal.pause()


def begin(mib):
    process = subprocess.Popen([sys.executable, __file__, str(mib)], stdout=subprocess.PIPE, text=True)
    return process, json.loads(process.stdout.readline())


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
