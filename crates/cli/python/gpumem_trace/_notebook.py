"""The extension of IPython: `%load_ext gpumem_trace` prints a line after each cell, and `%%gpumem` shows the memory of each line of a cell, and a
picture of it."""

import ast
import contextlib
import linecache

from ._library import Error, note
from ._lines import Call
from ._record import record
from ._trace import _COROUTINE, GPUMemTrace, show

# The value of the last expression of a cell, until IPython shows it.
_VALUE = "__gpumem_value__"


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
            self.traces.pop().__exit__()

    def lines(self, line, cell):
        """Runs a cell, and shows the memory of each of its lines."""
        if line.strip():
            from IPython.core.error import UsageError

            raise UsageError(f"%%gpumem takes no options: {line}")
        code, text = self.compiled(cell)
        with self.measured(code, text):
            exec(code, self.shell.user_ns)
        return self.shell.user_ns.pop(_VALUE, None)

    # A semicolon at the end hides the value.
    lines._ipython_magic_output_can_be_silenced = True

    async def lines_of_task(self, cell):
        """Like `lines`, but for a cell with an `await` at its top level."""
        code, text = self.compiled(cell)
        with self.measured(code, text):
            await eval(code, self.shell.user_ns)
        return self.shell.user_ns.pop(_VALUE, None)

    def compiled(self, cell):
        name, text = f"<cell {len(self.shell.history_manager.input_hist_parsed) - 1}>", self.shell.transform_cell(cell)
        tree = ast.parse(text, name)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            tree.body[-1] = ast.copy_location(ast.Assign([ast.Name(_VALUE, ast.Store())], last.value), last)
        return compile(ast.fix_missing_locations(tree), name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), text

    @contextlib.contextmanager
    def measured(self, code, text):
        """Shows the table of the lines and a picture after a `with` block. An error in the block is more important than both."""
        from IPython.display import display

        linecache.cache[code.co_filename] = len(text), None, text.splitlines(True), code.co_filename
        call, recording = Call(code, code.co_filename.strip("<>"), None, lambda table: show(f"{table}\n")), record()
        with _without_picture_if_it_fails():
            if call.trace.is_measured:
                recording.start()
        try:
            with call:
                yield
        finally:
            recording.stop()
        with _without_picture_if_it_fails():
            if recording.is_complete:
                display({"image/svg+xml": recording.svg()}, raw=True)

    def transform(self, lines):
        """Makes a cell wait itself for what its lines wait for: IPython does not wait for magics."""
        cell = "".join(lines[1:])
        try:
            if lines[0].split() != ["%%gpumem"] or not self.compiled(cell)[0].co_flags & _COROUTINE:
                return lines
        except (IndexError, SyntaxError):
            return lines
        semicolon = ";" if cell.rstrip().endswith(";") else ""
        return [f"await get_ipython().find_cell_magic('gpumem').__self__.lines_of_task({cell!r}){semicolon}\n"]


@contextlib.contextmanager
def _without_picture_if_it_fails():
    try:
        yield
    except Error as why:
        note(f"the cell has no picture, because {why}")


def load(shell):
    cells = Cells(shell)
    shell.events.register("pre_run_cell", cells.start)
    shell.events.register("post_run_cell", cells.end)
    shell.register_magic_function(cells.lines, "cell", "gpumem")
    # The last of the others makes a call of the magic.
    shell.input_transformers_cleanup.insert(0, cells.transform)
    return cells


def unload(shell, cells):
    shell.events.unregister("pre_run_cell", cells.start)
    shell.events.unregister("post_run_cell", cells.end)
    shell.input_transformers_cleanup.remove(cells.transform)
    while cells.traces:
        cells.traces.pop().stop()
