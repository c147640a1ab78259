"""The extension of IPython in a real kernel, on a simulated GPU. `.ci/wheel` runs it with nbclient."""

import unittest

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


def run(*cells):
    """Runs the cells of a notebook. Returns what each prints, with its value."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, kernel_name="python3", timeout=60).execute()
    values = {
        "execute_result": lambda out: f"Out: {out.data['text/plain']}\n",
        "display_data": lambda out: "picture\n" if out.data["image/svg+xml"].startswith("<svg") else "",
        "stream": lambda out: out.text if out.name == "stdout" else "",
    }
    return ["".join(values[out.output_type](out) for out in cell.outputs) for cell in notebook.cells]


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
        self.assertEqual(lines[-2:], ["picture", "△Used Peaked MB:     20      5 (cell 3: exit)"])
        self.assertEqual((outputs[3], outputs[5]), ("Out: 20971520\n△Used Peaked MB:      0      0 (cell 4: exit)\n", ""))

    def test_there_are_no_options(self):
        with self.assertRaisesRegex(CellExecutionError, "UsageError: %%gpumem takes no options: fast"):
            run("%load_ext gpumem_trace", "%%gpumem fast\nprint(1)")

    def test_values_and_tasks(self):
        outputs = run(
            "%load_ext gpumem_trace\nimport asyncio\nfrom gpumem_trace import sim",
            "%%gpumem\nfirst = sim.alloc(10 << 20)\nfirst.bytes",
            "%%gpumem\nfirst.bytes;",
            "%%gpumem\nawait asyncio.sleep(0.01)\nsecond = sim.alloc(20 << 20)\nawait asyncio.sleep(0.01, second.bytes)",
            "%%gpumem\nawait asyncio.sleep(0.01, 7);",
            "%%gpumem\nasync def later():\n    return 8\nprint('no task')",
            "_ + 1, '__gpumem_value__' in globals()",
        )
        self.assertIn("      10       10      1      1  first = sim.alloc(10 << 20)\n", outputs[1])
        self.assertIn("Out: 10485760\n", outputs[1])
        self.assertNotIn("Out: ", outputs[2] + outputs[4])
        lines = outputs[3].splitlines()
        self.assertEqual(lines[0], "cell 4 (<cell 4>), in MB:")
        self.assertEqual(lines[3], "      20       20      1      2  second = sim.alloc(20 << 20)")
        self.assertEqual(lines[5:], ["picture", "Out: 20971520", "△Used Peaked MB:     20      0 (cell 4: exit)"])
        self.assertIn("      1  await asyncio.sleep(0.01, 7);\n", outputs[4])
        self.assertTrue(outputs[5].startswith("no task\ncell 6 "), outputs[5])
        self.assertTrue(outputs[6].startswith("Out: (20971521, False)\n"), outputs[6])


if __name__ == "__main__":
    unittest.main()
