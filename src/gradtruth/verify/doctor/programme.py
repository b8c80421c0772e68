"""The programme: the problems that the doctor examines, always the same, each for a reason."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.verify.cases.case import Case
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.recipe import Place, Recipe

__all__ = ["PROGRAMME", "Item", "case_of"]


@dataclass(frozen=True, slots=True)
class Item:
    """A problem of the programme.

    Attributes:
        name: of the case in reports.
        recipe: makes its tensors.
        why: what it is there for.
        quick: part of the quick programme.
    """

    name: str
    recipe: Recipe
    why: str
    quick: bool = False


def case_of(recipe: Recipe, device: torch.device | str = "cpu") -> Case:
    """The tensors of a recipe as a case; of packed arrangements the parts are cases of views."""
    sample = make(recipe, device)
    problem = sample.problem
    return Case.of(
        replace(problem.spec, packing="separate"),
        sample.inputs,
        sample.dout,
        sample.dlse,
        max_seqlen=(problem.max_seqlen_q, problem.max_seqlen_kv),
        provenance={"recipe": recipe.encode()},
    )


def _item(  # noqa: PLR0913 - a line of the table below
    name: str,
    why: str,
    spec: Spec,
    sizes: str,
    dims: int | tuple[int, int] = 64,
    dtype: str = "bfloat16",
    *,
    quick: bool = False,
    bias_shape: tuple[int, int, int, int] | None = None,
    mask_shape: tuple[int, int, int, int] | None = None,
    **recipe: Any,
) -> Item:
    """An item; ``sizes`` is "B S T H/G"."""
    batch, S, T, heads = sizes.split()
    num_heads, num_gqa_groups = map(int, heads.split("/"))
    head_dim_qk, head_dim_v = (dims, dims) if isinstance(dims, int) else dims
    problem = Problem(
        spec=spec,
        batch=int(batch),
        seqlen_q=int(S),
        seqlen_kv=int(T),
        num_heads=num_heads,
        num_gqa_groups=num_gqa_groups,
        head_dim_qk=head_dim_qk,
        head_dim_v=head_dim_v,
        dtype=dtype,
        bias_shape=bias_shape,
        bias_dtype=None if bias_shape is None else dtype,
        mask_shape=mask_shape,
    )
    return Item(name, Recipe(problem=problem, **recipe), why, quick)


_CAUSAL = Spec(right=0)
_BOTTOM_RIGHT = Spec(right=0, alignment="bottom_right")
_THD = Spec(layout="thd", lengths="cu_seqlens")
_THD_CAUSAL = Spec(layout="thd", lengths="cu_seqlens", right=0)

_QUERYLESS: tuple[Place, ...] = ((0, 0, 0, 3), (4, 3, 4, 6))
_PACKED: tuple[Place, ...] = (
    (0, 70, 0, 70),
    (70, 0, 70, 20),
    (75, 129, 95, 129),
    (204, 1, 224, 40),
)
_DOCUMENTS: tuple[Place, ...] = ((0, 97, 0, 97), (97, 64, 97, 64), (161, 95, 161, 95))
_PADDED: tuple[Place, ...] = ((0, 120, 0, 120), (0, 33, 0, 33), (0, 64, 0, 64))

PROGRAMME: tuple[Item, ...] = (
    _item("causal-gqa-d64", "what most models train with", _CAUSAL, "2 200 200 4/2", quick=True),
    _item(
        "causal-two-sequences-d256",
        "per-row statistics of one sequence used for another",
        Spec(layout="sbhd", right=0),
        "2 64 64 8/1",
        256,
        family="outlier",
        quick=True,
    ),
    _item(
        "thd-queryless-gqa-d8",
        "keys that no query sees, padded offsets, scratch memory that is read",
        replace(_THD, scale=0.1),
        "2 12 12 2/1",
        8,
        "float16",
        places=_QUERYLESS,
        quick=True,
    ),
    _item(
        "thd-gaps-gqa-d128",
        "gaps, a tail, an empty and a one-token sequence",
        _THD_CAUSAL,
        "4 210 270 8/2",
        128,
        places=_PACKED,
    ),
    _item("thd-documents-d64", "packed documents", _THD_CAUSAL, "3 256 256 4/4", places=_DOCUMENTS),
    _item(
        "thd-documents-gqa-d256",
        "packed documents at the largest head dim",
        _THD_CAUSAL,
        "3 256 256 4/1",
        256,
        places=_DOCUMENTS,
    ),
    _item("full-mha-d128-fp16", "no mask, the other half precision", Spec(), "2 130 130 4/4", 128, "float16",
          family="peaked"),
    _item("full-fp32-d64", "fp32 means fp32: no TF32", Spec(), "2 100 100 2/2", 64, "float32",
          family="large_offset", quick=True),
    _item("causal-fp32-gqa-d128", "fp32 with a mask and groups", _CAUSAL, "1 130 130 4/2", 128, "float32"),
    _item("window-d64", "a sliding window: its bounds, forward and backward", Spec(left=64, right=0),
          "2 257 257 4/2", family="tagged"),
    _item("window-both-d128", "a window to both sides, bottom-right", Spec(left=30, right=17, alignment="bottom_right"),
          "1 150 190 2/2", 128),
    _item("bottom-right-longer-keys-d64", "causal with more keys than queries", _BOTTOM_RIGHT, "2 60 190 4/2"),
    _item("bottom-right-longer-queries-d64", "rows that see no key", _BOTTOM_RIGHT, "2 190 60 4/2"),
    _item("top-left-longer-keys-d64", "keys that no query sees", _CAUSAL, "2 60 190 4/2"),
    _item("cross-d64", "cross attention", Spec(), "2 70 257 4/4"),
    _item("padded-d64", "padded batch, lengths by cu_seqlens", Spec(lengths="cu_seqlens", right=0),
          "3 130 130 4/2", places=_PADDED),
    _item("padded-full-d64", "padding keys would be seen", Spec(lengths="cu_seqlens"), "3 130 130 4/2", places=_PADDED),
    _item("padding-mask-d128", "padded batch, lengths by a mask", Spec(lengths="padding_mask"), "3 130 130 4/4",
          128, places=_PADDED),
    _item("tail-64-large-logits-d64", "lse far below 0 and a last tile half full", Spec(), "2 64 64 2/2",
          family="neglogit", quick=True),
    _item("tail-129-large-logits-d128", "one key in the last tile", Spec(), "1 129 129 2/2", 128, "float16",
          family="neglogit"),
    _item("decode-gqa-d128", "one query", Spec(), "3 1 40 8/2", 128),
    _item("one-key-d64", "one key: dq and dk are 0", Spec(), "2 5 1 2/2"),
    _item("odd-dim-d80", "a head dim that fills no tile", _CAUSAL, "2 90 90 4/2", 80, family="taildim"),
    _item("odd-dim-d104", "a head dim that is no multiple of 16", _CAUSAL, "2 96 96 3/3", 104),
    _item("mla-d192-d128", "values narrower than keys", _CAUSAL, "1 140 140 4/4", (192, 128)),
    _item("bias-d64", "bias with a gradient", Spec(bias="post_scale"), "2 100 100 4/4", bias_shape=(1, 4, 100, 100)),
    _item("alibi-d64", "ALiBi", Spec(right=0, alibi=True), "2 100 100 4/2"),
    _item("sink-window-gqa-d64", "a learnable sink and a window", Spec(left=32, right=0, softmax="learnable"),
          "2 130 130 8/2"),
    _item("softcap-window-d128", "a softcap that bends", Spec(left=48, right=0, softcap=5.0), "2 130 130 4/2", 128,
          family="peaked"),
    _item("mask-d64", "a mask tensor with rows that see nothing", Spec(arbitrary=True), "2 64 64 4/4",
          mask_shape=(2, 1, 64, 64)),
    _item("dropout-gqa-d64", "dropout", replace(_CAUSAL, dropout_p=0.2), "2 100 100 4/2"),
    _item("qkv-packed-views-d64", "slices of one projection, dout expanded", _CAUSAL, "2 96 96 4/4",
          arrangement="wide", dout="expanded_heads"),
    _item("repeated-keys-d64", "equal scores: dq cancels", Spec(), "2 120 120 4/2", family="repeated_keys"),
    _item("long-d64", "many tiles", _CAUSAL, "1 1100 1100 2/1", family="outlier"),
    _item("many-heads-d64", "as many heads as a large model", _CAUSAL, "1 80 80 64/8", family="tagged"),
)  # fmt: skip
"""Every item. Sizes are small: the faults that it is there for do not need large ones."""
