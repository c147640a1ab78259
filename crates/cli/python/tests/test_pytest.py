"""The pytest plugin of the installed package, on a simulated GPU. `.ci/wheel` runs this with pytest and pytest-xdist."""

import json
import os
import subprocess
import sys
import tempfile
import unittest

TESTS = """
import pytest
from gpumem_trace import sim

MIB = 1 << 20
KEPT = []

@pytest.mark.limit_gpu_memory("10 MB")
@pytest.mark.parametrize("mib", [10, 11])
def test_limit(mib):
    sim.alloc(mib * MIB).free()

@pytest.mark.limit_gpu_leaks("1 MB")
@pytest.mark.parametrize("mib", [1, 2])
def test_leak(mib):
    sim.alloc(500 * MIB).free()
    KEPT.append(sim.alloc(mib * MIB))

@pytest.mark.limit_gpu_memory("1 KB")
def test_own_failure():
    sim.alloc(MIB).free()
    assert False, "its own"
"""

THREADS = """
from concurrent.futures import ThreadPoolExecutor
import pytest
from gpumem_trace import gpu_mem_trace, sim

kept = []

@gpu_mem_trace
def load(_):
    kept.append(sim.alloc(10 << 20))

@pytest.mark.limit_gpu_memory("20 MB")
@pytest.mark.limit_gpu_leaks("20 MB")
def test_threads():
    with ThreadPoolExecutor(1) as threads:
        list(threads.map(load, range(3)))
"""

LEAKS = """
import pytest
from gpumem_trace import sim

kept = []

def fill_cache():
    kept.append(sim.alloc(30 << 20))

def leak():
    kept.append(sim.alloc(20 << 20))

def is_leak(row):
    return not any("fill_cache" in frame for frame in row["frames"])

def work():
    fill_cache()
    leak()

@pytest.mark.limit_gpu_leaks("20 MB", filter_fn=is_leak)
def test_enough():
    work()

@pytest.mark.limit_gpu_leaks("19 MB", filter_fn=is_leak)
def test_too_much():
    work()

@pytest.mark.limit_gpu_leaks("1 MB", filter_fn=lambda row: row["nothing"])
@pytest.mark.parametrize("is_wrong", [False, True])
def test_wrong_filter(is_wrong):
    work()
    assert not is_wrong, "its own"
"""


class Plugin(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.write("test_limits.py", TESTS)

    def write(self, name, text):
        with open(os.path.join(self.folder.name, name), "w") as file:
            file.write(text)

    def run_pytest(self, *options, **env):
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=self.folder.name, env={**os.environ, **env}, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def test_limits(self):
        code, out = self.run_pytest("--gpumem")
        self.assertIn("3 failed, 2 passed", out)
        self.assertIn("the test needed 11 MB of GPU memory, which is more than its limit of 10 MB", out)
        self.assertIn("2 MB more of GPU memory is in use after the test, and its limit is 1 MB", out)
        self.assertIn("AssertionError: its own", out)
        self.assertNotIn("limit of 1 KB", out)
        self.assertIn("      500 MB  test_limits.py::test_leak[1]\n", out)
        self.assertEqual(code, 1)

    def test_threads_with_traces_of_their_own_count(self):
        self.write("test_limits.py", THREADS)
        code, out = self.run_pytest()
        self.assertIn("the test needed 30 MB of GPU memory, which is more than its limit of 20 MB", out)
        self.assertIn("30 MB more of GPU memory is in use after the test, and its limit is 20 MB", out)

    @unittest.skipUnless(sys.version_info >= (3, 11), "the lines of older versions are not known")
    def test_leaks_are_filtered_by_their_places(self):
        self.write("test_limits.py", LEAKS)
        _, out = self.run_pytest()
        self.assertIn("3 failed, 1 passed", out)
        self.assertEqual((out.count("KeyError: 'nothing'"), "AssertionError: its own" in out), (2, True), out)
        self.assertIn("20 MB more of GPU memory is in use after the test, and its limit is 19 MB:\n  20 MB from test_limits.py:11\n", out)

    def test_what_is_not_measured_does_not_pass(self):
        code, out = self.run_pytest("-k", "limit and 10", GPUMEM_GAUGE="off")
        self.assertIn("the limit of 10 MB was not checked, because GPU memory cannot be measured here", out)
        self.assertEqual(code, 1)

    def test_baseline(self):
        options = ["-k", "limit and 10", "--gpumem-baseline", "base.json"]
        self.assertEqual(self.run_pytest(*options)[0], 0)
        with open(os.path.join(self.folder.name, "base.json")) as file:
            self.assertEqual(json.load(file), {"test_limits.py::test_limit[10]": 10 << 20})
        self.write("test_limits.py", TESTS.replace("mib * MIB).free", "(mib - 2) * MIB).free"))
        self.assertEqual(self.run_pytest(*options)[0], 0)
        self.write("base.json", json.dumps({"test_limits.py::test_limit[10]": 5 << 20}))
        code, out = self.run_pytest(*options)
        self.assertIn("the test needed 8 MB of GPU memory, and 5 MB in ", out)
        self.assertEqual((code, self.run_pytest(*options, "--gpumem-update")[0], self.run_pytest(*options)[0]), (1, 0, 0))
        code, out = self.run_pytest(*options, GPUMEM_GAUGE="off")
        self.assertIn("cannot be compared with the baseline, because it was not measured", out)
        for wrong in ("[1]", '{"a": 1e999}', "[" * 200000):
            self.write("base.json", wrong)
            self.assertIn("is not a baseline of gpumem", self.run_pytest(*options)[1])
        self.assertIn("/dev/full is not a regular file", self.run_pytest("--gpumem-baseline", "/dev/full")[1])
        self.assertIn("the baseline of gpumem cannot be written: ", self.run_pytest("--gpumem-baseline", "/proc/base.json")[1])

    def test_a_baseline_that_cannot_be_written_stays_and_hides_no_failure(self):
        self.write("base.json", "{}")
        # A folder is where the new file is written.
        self.write("test_folder.py", "import os, pytest\n@pytest.mark.parametrize('of', [1, 2])\ndef test_folder(of):\n    assert of == 1, 'its own'\n    os.mkdir('base.json.new')\n")
        for only, has_failed in (("1", False), ("1 or 2", True)):
            code, out = self.run_pytest("test_folder.py", "-k", only, "--gpumem-baseline", "base.json", "--gpumem-update")
            self.assertIn("the baseline of gpumem is not written: ", out)
            self.assertEqual((code, "AssertionError: its own" in out), (1, has_failed))
            with open(os.path.join(self.folder.name, "base.json")) as file:
                self.assertEqual(file.read(), "{}")
            os.rmdir(os.path.join(self.folder.name, "base.json.new"))

    def test_wrong_arguments(self):
        for size in ("'ten'", "-1"):
            self.write("test_limits.py", TESTS.replace('"10 MB"', size))
            self.assertIn(f"{size} is not a size of memory; write for example '512 MB'", self.run_pytest()[1])
        self.write("test_limits.py", TESTS.replace('"10 MB"', ""))
        self.assertIn("write @pytest.mark.limit_gpu_memory('512 MB')", self.run_pytest()[1])
        self.write("test_limits.py", TESTS.replace('leaks("1 MB"', 'leaks("1 MB", filter_fn=1'))
        self.assertIn("and filter_fn=f for those leaks that count", self.run_pytest()[1])

    def test_settings_and_workers(self):
        self.write("pyproject.toml", "[tool.pytest.ini_options]\ngpumem = true\ngpumem_most = 1\n")
        _, out = self.run_pytest()
        self.assertIn("500 MB", out)
        self.assertNotIn("  10 MB ", out)
        self.assertIn("500 MB", self.run_pytest("-n", "2")[1])


if __name__ == "__main__":
    unittest.main()
