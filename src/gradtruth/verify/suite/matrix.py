"""The support matrix: which feature of the suite each backend supports, found by asking it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from gradtruth.backends import ORDER, get
from gradtruth.core.problem import Problem
from gradtruth.core.support import ReasonCode
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.suite import AXES, allowed, build, suite

__all__ = ["features", "golden", "markdown"]

_PLAIN = {
    "layout": "bshd", "arrangement": "contiguous", "source": "full", "places": "full", "hint": "none", "size": "blocks",
    "batch": "2", "heads": "4/2", "dims": "64", "dtype": "float32", "mask": "full", "mask_shape": "-",
    "window": "none", "alignment": "top_left", "bias": "none", "bias_shape": "-", "bias_dtype": "input",
    "bias_inf": "no", "alibi": "none", "softmax": "vanilla", "softcap": "none", "scale": "default", "dropout": "0",
    "max_logit": "no", "dlse": "no", "dout": "contiguous", "wanted": "all", "family": "gaussian", "poison": "nan",
}  # fmt: skip
_NEEDS: dict[str, dict[str, str]] = {
    "layout=thd": {"source": "cu_seqlens"},
    "places=ragged": {"source": "cu_seqlens"},
    "places=left": {"source": "padding_mask"},
    "places=middle": {"source": "padding_mask"},
    "places=holes": {"source": "padding_mask"},
    "places=zeros": {"source": "cu_seqlens"},
    "places=one": {"size": "small"},
    "places=gaps": {"layout": "thd", "source": "cu_seqlens"},
    "places=tail": {"source": "cu_seqlens"},
    "hint=loose": {"source": "cu_seqlens"},
    "hint=clamp": {"source": "cu_seqlens"},
    "arrangement=3hd": {"heads": "3/3"},
    "arrangement=h3d": {"heads": "3/3"},
    "heads=8/1": {"size": "small"},
    "mask=arbitrary": {"mask_shape": "bhst"},
    "mask=arbitrary_causal": {"mask_shape": "bhst"},
    "bias=pre_scale": {"bias_shape": "bhst"},
    "bias=post_scale": {"bias_shape": "bhst"},
    "bias_dtype=float32": {"bias": "post_scale", "bias_shape": "bhst", "dtype": "bfloat16"},
    "bias_inf=yes": {"bias": "post_scale", "bias_shape": "bhst"},
    "wanted=dq,dbias": {"bias": "post_scale", "bias_shape": "bhst"},
    "wanted=dsoftmax_offset": {"softmax": "learnable"},
}
_VALUES_ONLY = ("family", "poison", "dout", "wanted", "size")  # change no answer of ``supports``


_EXPLANATION = """\
Generated from what each backend's `supports` answers: `pytest tests/backends/test_support_matrix.py --update-golden`
writes it anew. Every row adds one feature to a plain problem (bshd, full sequences, 4 query and 2 KV heads, head
dim 64, fp32). A cell names what the backend refuses; `gradtruth explain` says why, for any problem.

- arrangement: how q, k, v lie in memory: slices of packed buffers (`3hd` ... `h2d`), a view of the other layout,
  expanded KV heads, every second row, an unaligned start, a slice of wider rows, every second element.
- source: what says where sequences are. places: `left`-padded, in the `middle`, with hidden places between (`holes`),
  with `zeros` as lengths, of length `one`, with `gaps` between or an unused `tail`.
- hint: max_seqlen is not given, larger than every sequence, or smaller (`clamp`).
- mask_shape and bias_shape: `1` where the tensor is broadcast over **b**atch, **h**eads, querie**s**, keys (**t**).
- window: (left, right), `w` any length, `-1` unlimited.""".splitlines()


def features() -> Iterator[tuple[str, Problem]]:
    """Per feature "axis=value" a problem that has it and, beside what it needs, nothing else."""
    for axis in AXES:
        if axis in _VALUES_ONLY:
            continue
        for value in AXES[axis]:
            name = f"{axis}={value}"
            row = _PLAIN | _needed(axis, value) | {axis: value}
            if value == "-" or any(row[a] not in allowed(row, a) for a in row):
                continue
            yield name, make(build(row, 0)).problem


def _needed(axis: str, value: str) -> dict[str, str]:
    if axis == "mask_shape":
        return {"mask": "arbitrary"}
    if axis == "bias_shape":
        return {"bias": "post_scale"}
    return _NEEDS.get(f"{axis}={value}", {})


def markdown(device: torch.device | str = "cpu", names: Sequence[str] = ORDER) -> str:
    """The matrix as a Markdown page: a row per feature, what speaks against it per backend."""
    where = torch.device(device)
    shown, absent = _present(where, names)
    lines = [f"# Support matrix ({where.type})", "", *_EXPLANATION, ""]
    lines += [
        "| feature | values | " + " | ".join(shown) + " |",
        "| --- | --- |" + " --- |" * len(shown),
    ]
    for axis, values, cells in _grouped(shown, where):
        listed = ", ".join(f"`{value}`" for value in values)
        lines.append(f"| {axis} | {listed} | " + " | ".join(cell or "yes" for cell in cells) + " |")
    lines += [""] + [
        f"`{name}` has no column, for it refuses the plain problem: {codes}.  "
        for name, codes in absent.items()
    ]
    return "\n".join(lines).rstrip() + "\n"


def golden(device: torch.device | str = "cpu", names: Sequence[str] = ORDER) -> str:
    """The matrix as text for a golden file.

    First the features alone, then, over the whole suite, how many problems each backend supports and how often it
    gives each reason.
    """
    device = torch.device(device)
    shown, absent = _present(device, names)
    lines = ["# a feature alone: the backends that refuse it, with reason codes"]
    for axis, values, cells in _grouped(shown, device):
        against = "; ".join(
            f"{name}: {cell}" for name, cell in zip(shown, cells, strict=True) if cell
        )
        lines.append(f"{axis} {' '.join(values)}: {against or 'all support it'}")
    lines += [f"the plain problem: {name}: {codes}" for name, codes in absent.items()]
    lines.append(
        f"# of the suite's {len(suite().recipes)} problems: supported; reason codes and how often"
    )
    for name in names:
        supported, counted = _counted(name, device)
        codes = ", ".join(f"{code} {counted[code]}" for code in ReasonCode if counted[code])
        lines.append(f"{name}: {supported}; {codes or 'refuses nothing'}")
    return "\n".join(lines) + "\n"


def _present(device: torch.device, names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The backends that take the plain problem, and why each other one does not."""
    plain = make(build(_PLAIN, 0)).problem
    codes = {name: _codes(name, plain, device) for name in names}
    return [n for n in names if not codes[n]], {n: found for n, found in codes.items() if found}


def _grouped(
    names: Sequence[str], device: torch.device
) -> Iterator[tuple[str, list[str], tuple[str, ...]]]:
    """Axis, values of it that get the same answers, and the answer of each backend."""
    found: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for feature, problem in features():
        axis, _, value = feature.partition("=")
        cells = tuple(_codes(name, problem, device) for name in names)
        found.setdefault((axis, cells), []).append(value)
    for (axis, cells), values in found.items():
        yield axis, values, cells


def _codes(backend: str, problem: Problem, device: torch.device) -> str:
    return ", ".join(sorted(_against(backend, problem, device)))


def _against(backend: str, problem: Problem, device: torch.device) -> set[ReasonCode]:
    """The codes of all reasons, but that a peer is not installed: the files are the same on every machine."""
    reasons = get(backend).supports(problem, device).reasons
    return {reason.code for reason in reasons} - {ReasonCode.NOT_INSTALLED}


def _counted(name: str, device: torch.device) -> tuple[int, Counter[ReasonCode]]:
    supported, counted = 0, Counter()
    for recipe in suite().recipes:
        codes = _against(name, recipe.problem, device)
        supported += not codes
        counted.update(codes)
    return supported, counted
