"""Compile the Triton kernels for GPUs that are not here, and print registers, spills and shared memory.

    python -m benchmarks.compile                  # the main schedules, sm_80 to sm_120
    python -m benchmarks.compile --arch 90 --all  # every feature, one architecture
    PYTHONPATH=FOLDER python -m benchmarks.compile --only-compile --dim 64    # with the Triton in FOLDER: make newest

``spill`` is what ptxas stores to local memory, in bytes; ``hot`` how many instructions of the innermost loops read or
write it: what is kept there over a whole loop costs nothing that can be measured, what is moved in each turn does.
The launches of a forward and a backward are recorded on the CPU, with the types, divisibilities and constants that
Triton would specialise on, and compiled by Triton's own pipeline for the given architecture. Exits with 1 when a main
schedule spills in a loop on sm_90, or a kernel needs more shared memory than an architecture has.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import torch

from gradtruth.backends.triton.schedule import tiles_for
from gradtruth.core.problem import DTYPES, Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Forward, Inputs, Wanted

# Bytes of shared memory that a block may use.
SHARED = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}
ARCHITECTURES = (80, 89, 90, 100, 120)
# Bounds of the mask are arguments, so these are the kernels of every window and of full attention too.
MAIN = tuple(("causal", dim, "bfloat16", {"right": 0}) for dim in (64, 128, 256))
FEATURES = (
    ("post-scale bias", 128, "bfloat16", {"bias": "post_scale"}),
    ("pre-scale bias, softcap", 128, "bfloat16", {"bias": "pre_scale", "softcap": 30.0}),
    ("arbitrary", 128, "bfloat16", {"arbitrary": True}),
    ("softcap, window", 256, "bfloat16", {"softcap": 30.0, "left": 128, "right": 0}),
    ("dropout", 64, "bfloat16", {"dropout_p": 0.1}),
    ("alibi", 64, "float16", {"alibi": True, "right": 0}),
    ("sink, max logit", 64, "bfloat16", {"softmax": "learnable", "max_logit": True, "right": 0}),
    ("fp32", 64, "float32", {"right": 0}),
    ("fp32", 128, "float32", {"right": 0}),
    ("fp32", 256, "float32", {"right": 0}),
    ("thd", 128, "bfloat16", {"layout": "thd", "lengths": "cu_seqlens", "right": 0}),
    ("odd head dim", 80, "bfloat16", {"right": 0}),
    ("odd head dim", 192, "bfloat16", {"right": 0}),
    ("wide", 512, "bfloat16", {"right": 0}),
    ("wide", 576, "bfloat16", {"right": 0}),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a kernel was launched with: its function, arguments and options."""

    function: object
    tensors: tuple[torch.Tensor, ...]
    strides: tuple[int, ...]
    numbers: tuple[int | float, ...]
    constants: dict[str, object]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What ptxas says of one kernel."""

    kernel: str
    registers: int | None
    spilled: int | None
    hot: int | None
    shared: int
    seconds: float


def tensors(dim: int, dtype: str, spec: Spec, length: int = 256, heads: int = 4) -> Inputs:
    """Inputs of two sequences; only their metadata matters."""
    kind, thd = DTYPES[dtype], spec.layout == "thd"
    shape = (2 * length, heads, dim) if thd else (2, length, heads, dim)
    q, k, v = (torch.zeros(shape, dtype=kind) for _ in range(3))
    cu = torch.tensor([0, length, 2 * length], dtype=torch.int32) if thd else None
    square = torch.zeros(1, 1, length, length)
    return Inputs(
        q=q, k=k, v=v, cu_seqlens_q=cu, cu_seqlens_kv=cu,
        attention_mask=square.bool() if spec.arbitrary else None,
        bias=square.to(kind) if spec.bias != "none" else None,
        alibi_slopes=torch.ones(heads) if spec.alibi else None,
        softmax_offset=torch.zeros(heads) if spec.softmax == "learnable" else None,
        dropout_seed=torch.zeros((), dtype=torch.int64) if spec.dropout_p else None,
    )  # fmt: skip


def launches(dim: int, dtype: str, spec: Spec, arch: int) -> list[Launch]:
    """The launches of a forward and a backward on a GPU of that architecture."""
    from gradtruth.backends.triton import arguments, compiled, launch

    inputs = tensors(dim, dtype, spec)
    problem = Problem.of(spec, inputs)
    found: list[Launch] = []

    def record(kernel, programs, *arguments):
        found.append(Launch(kernel._function, *arguments))

    tiles = tiles_for(problem, large=SHARED[arch] >= 220 * 1024)
    with ExitStack() as stack:
        stack.enter_context(patch.object(compiled.Kernel, "__call__", record))
        stack.enter_context(patch.object(arguments, "schedule", lambda *_: tiles))
        forward = launch.attend(problem, inputs)
        launch.differentiate(
            problem, inputs, Forward(out=forward.out, lse=forward.lse), inputs.v, None, Wanted()
        )
    return found


def compiled(launch: Launch, arch: int, *, assemble: bool = True) -> Compiled:
    """Compile one launch for sm_<arch>; without ``assemble`` registers and spills are not asked for."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import ASTSource

    function, constants = launch.function, dict(launch.constants)
    options = {
        name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants
    }
    signature, attributes = {}, {}
    values = (*launch.tensors, *launch.strides, *launch.numbers)
    for at, (name, value) in enumerate(zip(function.arg_names, values, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + _NAMES[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif at < len(launch.tensors) + len(launch.strides) and value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i32"
            if at < len(launch.tensors) + len(launch.strides) and value % 16 == 0:
                attributes[(at,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    begin = time.perf_counter()
    source = ASTSource(function, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    seconds = time.perf_counter() - begin
    registers, spilled, hot = _assembled(kernel.asm["ptx"], arch) if assemble else (None,) * 3
    return Compiled(function.__name__, registers, spilled, hot, kernel.metadata.shared, seconds)


_NAMES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.int32: "i32", torch.int64: "i64", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


def _assembled(ptx: str, arch: int) -> tuple[int, int, int]:
    """Registers and spilled bytes, from ptxas; local memory instructions in innermost loops."""
    import triton
    from triton.backends.nvidia.compiler import get_ptxas

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    name = Path(get_ptxas(arch).path)
    target = f"sm_{arch}{'a' if arch >= 90 else ''}"
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "kernel.ptx"
        file.write_text(ptx)
        done = subprocess.run(
            [name, "-v", f"--gpu-name={target}", file, "-o", f"{file}.cubin"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        hot = _hot(folder / "nvdisasm", f"{file}.cubin")
    used = int(re.findall(r"Used (\d+) registers", done.stderr)[-1])
    stores = sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stderr)))
    return used, stores, hot


def _hot(nvdisasm: Path, cubin: str) -> int:
    """Reads and writes of local memory in loops that hold no other loop."""
    done = subprocess.run([nvdisasm, "-c", cubin], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    labels = {
        line.split(":")[0].strip(): at for at, line in enumerate(lines) if line.startswith(".L")
    }
    loops = []
    for at, line in enumerate(lines):
        found = re.search(r"BRA.*`\((\.L\w+)\)", line)
        if found and labels.get(found[1], at) < at:
            loops.append((labels[found[1]], at))
    inner = [x for x in loops if not any(x != y and x[0] <= y[0] and y[1] <= x[1] for y in loops)]
    return sum(bool(re.search(r"\b(LDL|STL)\b", line)) for a, b in inner for line in lines[a:b])


def report(
    selection, architectures, kernels=None, *, assemble: bool = True
) -> Iterator[dict[str, object]]:
    """One row per kernel (all, or those named), problem and architecture."""
    for arch in architectures:
        for name, dim, dtype, given in selection:
            for launch in launches(dim, dtype, Spec(**given), arch):
                if kernels is not None and launch.function.__name__ not in kernels:
                    continue
                found = compiled(launch, arch, assemble=assemble)
                constants = launch.constants
                tile = "x".join(str(constants.get(f"BLOCK_{x}", "")) for x in "MN")
                yield {
                    "arch": arch, "problem": name, "dim": dim, "dtype": dtype, "kernel": found.kernel,
                    "tile": tile, "warps": constants.get("num_warps"),
                    "stages": constants.get("num_stages"), "registers": found.registers,
                    "spilled": found.spilled, "hot": found.hot, "shared": found.shared,
                    "seconds": round(found.seconds, 1),
                }  # fmt: skip


def faults(row: dict[str, object]) -> str | None:
    """What a row has that it must not have."""
    if row["shared"] > SHARED[row["arch"]]:
        return f"{row['shared']} bytes of shared memory, sm_{row['arch']} has {SHARED[row['arch']]}"
    if row["arch"] == 90 and row["hot"] and row["problem"] == "causal":
        return "a loop of a main schedule spills"
    return None


def main() -> None:
    """Print a table; exit with 1 on a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="*", default=ARCHITECTURES)
    parser.add_argument(
        "--all", action="store_true", help="every feature, not only the main schedules"
    )
    parser.add_argument("--dim", type=int, nargs="*", help="these head dims alone")
    parser.add_argument("--kernels", nargs="*", help="these kernels alone")
    parser.add_argument(
        "--only-compile", action="store_true", help="do not ask for registers and spills"
    )
    parser.add_argument("--json", type=Path, help="write the rows there")
    given = parser.parse_args()
    rows, wrong = [], 0
    print(
        f"{'sm':>4} {'problem':24} {'d':>4} {'dtype':9} {'kernel':17} {'tile':>8} w s  regs spill hot shared"
    )
    chosen = [
        x for x in (MAIN + FEATURES if given.all else MAIN) if not given.dim or x[1] in given.dim
    ]
    for row in report(chosen, given.arch, given.kernels or None, assemble=not given.only_compile):
        rows.append(row)
        fault = faults(row)
        wrong += fault is not None
        counted = [("-" if row[n] is None else row[n]) for n in ("registers", "spilled", "hot")]
        print(
            f"{row['arch']:>4} {row['problem']:24} {row['dim']:>4} {row['dtype']:9} {row['kernel']:17} "
            f"{row['tile']:>8} {row['warps']} {row['stages'] or '-'} {counted[0]:>5} "
            f"{counted[1]:>5} {counted[2]:>3} {row['shared']:>6}  {fault or ''}", flush=True,
        )  # fmt: skip
    print(f"triton {version('triton')}: {len(rows)} kernels, {wrong} at fault")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
