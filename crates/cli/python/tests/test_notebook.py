"""The extension of IPython in a real kernel, on a simulated GPU. `.ci/wheel` runs it with nbclient."""

import unittest

import nbformat
from nbclient import NotebookClient


def run(*cells):
    """Runs the cells of a notebook. Returns what each prints."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    return ["".join(out.get("text", "") for out in cell.outputs if out.get("name") == "stdout") for cell in notebook.cells]


class Notebook(unittest.TestCase):
    def test_cells(self):
        outputs = run(
            "%load_ext gpumem_trace\nfrom gpumem_trace import sim",
            "kept = sim.alloc(10 << 20)\nsim.alloc(40 << 20).free()",
            "%%gpumem\nmore = sim.alloc(20 << 20)\nfor _ in range(2):\n    sim.alloc(5 << 20).free()\nprint('ran')",
            "more.bytes",
            "%unload_ext gpumem_trace",
            "more.free()",
        )
        self.assertEqual(outputs[1], "△Used Peaked MB:     10     40 (cell 2: exit)\n")
        lines = outputs[2].splitlines()
        self.assertEqual(lines[0], "ran")
        self.assertEqual(lines[1:3], ["cell 3 (<cell 3>), in MB:", "    used     peak  calls   line"])
        self.assertEqual(lines[3], "      20       20      1      1  more = sim.alloc(20 << 20)")
        self.assertEqual(lines[5], "       0       25      2      3      sim.alloc(5 << 20).free()")
        self.assertEqual(lines[-1], "△Used Peaked MB:     20      5 (cell 3: exit)")
        self.assertEqual((outputs[3], outputs[5]), ("△Used Peaked MB:      0      0 (cell 4: exit)\n", ""))


if __name__ == "__main__":
    unittest.main()
