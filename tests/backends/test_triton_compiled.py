"""The Triton kernels compiled for GPUs that are not here: they fit, and loops of main schedules do not spill.

A sample that takes under a minute; ``make compile`` does all schedules on all architectures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.compile import SHARED

ROOT = Path(__file__).parents[2]
# In a process of its own: another test may have put Triton's interpreter in place.
SCRIPT = """
import json, sys
from benchmarks import compile as c
given = json.loads(sys.argv[1])
selection = [("causal", dim, "bfloat16", {"right": 0}) for dim in given["dims"]]
rows = c.report(selection, given["architectures"], given.get("kernels"), assemble=given["assemble"])
print(json.dumps([{**row, "fault": c.faults(row)} for row in rows]))
"""
KERNELS = {"forward", "rows", "backward_keys", "backward_queries"}


def compiled(**given) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(given)],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1",
             "HOME": str(Path.home())},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_loops_of_main_schedules_do_not_spill_on_sm_90():
    rows = compiled(dims=[64, 128, 256], architectures=[90], assemble=True)
    assert {row["kernel"] for row in rows} == KERNELS
    assert {row["dim"] for row in rows} == {64, 128, 256}
    assert not [row["fault"] for row in rows if row["fault"]]
    assert all(0 < row["registers"] <= 255 for row in rows)


def test_other_architectures_compile_and_fit():
    kernels = ["forward", "backward_keys"]
    rows = compiled(dims=[64], architectures=[80, 89, 100, 120], kernels=kernels, assemble=False)
    assert [(row["arch"], row["kernel"]) for row in rows] == [
        (arch, kernel) for arch in (80, 89, 100, 120) for kernel in kernels
    ]
    assert all(0 < row["shared"] <= SHARED[row["arch"]] for row in rows)
