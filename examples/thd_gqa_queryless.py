"""A sequence without a query, as a case: two thd sequences with gaps, two query heads on one KV head.

The problem of a report against TransformerEngine's fused_attn_bwd: storage of 4 and 8 tokens, queries of 0 and 3
tokens, keys of 3 and 6. No query sees the first three keys, so their dk and dv are exactly 0, whatever was computed
before and whatever is in memory. The numbers are a closed form, so every machine writes the same file.

    python examples/thd_gqa_queryless.py       write examples/cases/thd-gqa-queryless.safetensors
    gradtruth verify examples/cases/thd-gqa-queryless.safetensors
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.suite.families import values

PATH = Path(__file__).parent / "cases" / "thd-gqa-queryless.safetensors"
TOKENS, HEADS, GROUPS, DIM = 12, 2, 1, 8
LONGEST = 8


def queryless_case() -> Case:
    """The case, on the CPU."""
    padded = offsets(0, 4, 12)
    inputs = Inputs(
        q=drawn("q", HEADS),
        k=drawn("k", GROUPS),
        v=drawn("v", GROUPS),
        cu_seqlens_q=offsets(0, 0, 3),
        cu_seqlens_kv=offsets(0, 3, 9),
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded.clone(),
    )
    return Case.of(
        Spec(layout="thd", lengths="cu_seqlens", scale=0.1),
        inputs,
        drawn("dout", HEADS),
        max_seqlen=(LONGEST, LONGEST),
        provenance={"source": "examples/thd_gqa_queryless.py", "family": "heterogeneous"},
    )


def drawn(role: str, heads: int) -> Tensor:
    """fp16 [tokens, heads, DIM]: another scale and offset in every head, finite in the gaps too."""
    return values("heterogeneous", role, (1, TOKENS, heads, DIM), seed=0)[0].half()


def offsets(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=PATH)
    chosen = parser.parse_args(arguments)
    case = queryless_case()
    identity = case.save(chosen.out)
    size = chosen.out.stat().st_size
    print(f"{chosen.out}  {size} bytes  {case.problem.label()}  {identity[:12]}")


if __name__ == "__main__":
    main()
