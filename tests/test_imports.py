"""What an import pulls in: the package and its pure part load no optional or heavy library."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import gradtruth

ROOT = Path(gradtruth.__file__).parent
CORE = sorted(
    f"gradtruth.core.{path.stem}"
    for path in (ROOT / "core").glob("*.py")
    if path.stem != "__init__"
)
HEAVY = [
    "triton", "matplotlib", "typer", "rich", "jinja2", "transformers", "gguf", "hypothesis", "pytest",
    "flash_attn", "transformer_engine", "xformers", "numpy.testing", "safetensors",
]  # fmt: skip
SCRIPT = """
import json, sys
import torch
before = set(sys.modules)
for name in {names!r}:
    __import__(name)
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@cache
def loaded_by(*names: str) -> frozenset[str]:
    """The modules that a fresh interpreter, in which torch is loaded, has after these imports and had not before."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(names=names)],
        capture_output=True, text=True, check=False, timeout=120,
        env={"PYTHONPATH": str(ROOT.parent), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # Nothing is printed or warned on import.
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
    return frozenset(json.loads(done.stdout))


@pytest.mark.parametrize("names", [("gradtruth",), tuple(CORE)], ids=["gradtruth", "core"])
def test_no_heavy_library_is_loaded(names):
    found = loaded_by(*names)
    assert set(names) <= found, "the probe does not see what is loaded"
    tops = {name.partition(".")[0] for name in found}
    assert not found & set(HEAVY)
    assert not tops & set(HEAVY)


def test_core_loads_nothing_above_it():
    found = {name for name in loaded_by(*CORE) if name.startswith("gradtruth")}
    assert found == {"gradtruth", "gradtruth.core", "gradtruth.errors", *CORE}
    assert {"gradtruth.core.spec", "gradtruth.core.problem", "gradtruth.core.tile"} <= found
