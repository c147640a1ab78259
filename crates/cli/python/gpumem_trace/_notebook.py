"""The extension of IPython: `%load_ext gpumem_trace` prints a line after each cell, and `%%gpumem` shows the memory of each line of a cell."""

import linecache

from ._lines import _measure
from ._trace import GPUMemTrace, show


class Cells:
    def __init__(self, shell):
        # A cell may run another one.
        self.shell, self.traces = shell, []

    def start(self, *_):
        # The cell is added to the history after this. `execution_count` is that of the next cell, in newer versions of IPython.
        self.traces.append(GPUMemTrace(ctx=f"cell {len(self.shell.history_manager.input_hist_parsed)}"))

    def end(self, *_):
        # The cell that loads the extension has no start.
        if self.traces:
            self.traces.pop()._exit()

    def lines(self, line, cell):
        """Runs a cell, and shows the memory of each of its lines."""
        cell_name, text = f"cell {len(self.shell.history_manager.input_hist_parsed) - 1}", self.shell.transform_cell(cell)
        name = f"<{cell_name}>"
        code = compile(text, name, "exec")
        linecache.cache[name] = len(text), None, text.splitlines(True), name
        _measure(code, cell_name, None, lambda: exec(code, self.shell.user_ns), lambda table: show(f"{table}\n"))


def load(shell):
    cells = Cells(shell)
    shell.events.register("pre_run_cell", cells.start)
    shell.events.register("post_run_cell", cells.end)
    shell.register_magic_function(cells.lines, "cell", "gpumem")
    return cells


def unload(shell, cells):
    shell.events.unregister("pre_run_cell", cells.start)
    shell.events.unregister("post_run_cell", cells.end)
    while cells.traces:
        cells.traces.pop().stop()
