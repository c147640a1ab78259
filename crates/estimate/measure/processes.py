"""Functions that run in a process of their own: it has no CUDA context at its begin, and all of its memory is gone at its end."""

import json
import os
import sys
import traceback


def described(error):
    """The type and the text of an error, without paths of the machine. The stack goes to stderr."""
    traceback.print_exception(error, file=sys.stderr)
    return "".join(traceback.format_exception_only(error)).strip()[-2000:]


def start(work):
    """Begins to run a function. `finish` returns its result."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            result = work()
        except BaseException as error:  # The parent must know of any error.
            result = {"error": described(error), "out_of_memory": type(error).__name__ == "OutOfMemoryError"}
        with os.fdopen(write, "w") as pipe:
            json.dump(result, pipe)
        os._exit(0)
    os.close(write)
    return child, read


def finish(started):
    """Waits for a function. Returns its result, or an object with `error`."""
    child, read = started
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"the process ended with status {status}"}
