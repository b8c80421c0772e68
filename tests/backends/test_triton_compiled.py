"""The Triton kernels compiled for GPUs that are not here: they fit, and loops of main schedules do not spill.

A sample that takes under a minute; ``make compile`` does all schedules on all architectures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.compile import SHARED

ROOT = Path(__file__).parents[2]
# In a process of its own: another test may have put Triton's interpreter in place.
SCRIPT = """
import json, sys
from benchmarks import compile as c
from gradtruth.core.spec import Spec
rows = []
dim, arch, kernels = json.loads(sys.argv[1])
for row in c.report([("causal", dim, "bfloat16", {"right": 0})], [arch], kernels):
    rows.append({**row, "fault": c.faults(row)})
print(json.dumps(rows))
"""
KERNELS = {"forward", "rows", "backward_keys", "backward_queries"}


def compiled(dim: int, arch: int, *kernels: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps([dim, arch, kernels or None])],
        capture_output=True, text=True, check=False, timeout=600, cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1",
             "HOME": str(Path.home())},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_loops_of_main_schedules_do_not_spill_on_sm_90(dim):
    rows = compiled(dim, 90)
    assert {row["kernel"] for row in rows} == KERNELS
    assert not [row["fault"] for row in rows if row["fault"]]
    assert all(0 < row["registers"] <= 255 for row in rows)


@pytest.mark.parametrize("arch", [80, 89, 100, 120])
def test_other_architectures_compile_and_fit(arch):
    rows = compiled(64, arch, "forward", "backward_keys")
    assert [row["kernel"] for row in rows] == ["forward", "backward_keys"]
    assert all(row["shared"] <= SHARED[arch] for row in rows)
