"""What `import dflash_runtime` costs."""

import subprocess
import sys

_CODE = """
import time
start = time.perf_counter()
import dflash_runtime
seconds = time.perf_counter() - start
import sys
heavy = {"torch", "transformers", "optimum", "openvino", "numpy", "tokenizers", "jinja2", "click"}
print(seconds, *sorted(heavy & set(sys.modules)))
"""


def test_import_is_quick_and_loads_nothing() -> None:
    found = [subprocess.run([sys.executable, "-c", _CODE], check=True, capture_output=True) for _ in range(3)]
    seconds = []
    for run in found:
        first, *modules = run.stdout.decode().split()
        assert modules == []
        seconds.append(float(first))
    assert min(seconds) < 0.15
