"""``gradtruth explain``: which backend computes a problem, and why not each other one."""

from __future__ import annotations

import sys
from typing import Annotated, get_args

import typer

from gradtruth.arguments import Options
from gradtruth.backends.select import Selection, select
from gradtruth.cli.device import device_of
from gradtruth.cli.sketch import Sizes, problem_of
from gradtruth.core.problem import DTYPES
from gradtruth.core.spec import Packing
from gradtruth.errors import InvalidProblem
from gradtruth.verify.report.console import print_table

__all__ = ["explain"]

_BIAS = {"none": None, "pre_scale": "pre_scale_bias", "post_scale": "post_scale_bias"}


def explain(
    batch: Annotated[int, typer.Option(help="Sequences.", min=0)] = 1,
    seqlen_q: Annotated[int, typer.Option(help="Queries per sequence.", min=0)] = 1024,
    seqlen_kv: Annotated[
        int | None, typer.Option(help="Keys; as many as queries if not given.", min=0)
    ] = None,
    heads: Annotated[int, typer.Option(help="Query heads.", min=1)] = 16,
    groups: Annotated[
        int | None, typer.Option(help="KV heads; as many as heads if not given.", min=1)
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Head dim of q and k.", min=1)] = 64,
    head_dim_v: Annotated[
        int | None, typer.Option(help="Head dim of v; that of q if not given.", min=1)
    ] = None,
    dtype: Annotated[str, typer.Option(help=f"{', '.join(DTYPES)}.")] = "bfloat16",
    qkv_format: Annotated[str, typer.Option(help="bshd, sbhd or thd.")] = "bshd",
    packing: Annotated[str, typer.Option(help="separate, 3hd, h3d, 2hd or h2d.")] = "separate",
    mask: Annotated[
        str, typer.Option(help="no_mask, padding, causal, padding_causal, causal_bottom_right ...")
    ] = "no_mask",
    window: Annotated[
        str | None, typer.Option(help="LEFT,RIGHT in tokens; -1 is unlimited.")
    ] = None,
    bottom_right: Annotated[
        bool | None,
        typer.Option(
            "--bottom-right/--top-left", help="Where a window's or ALiBi's diagonal starts."
        ),
    ] = None,
    softmax_scale: Annotated[
        float | None, typer.Option(help="1 / sqrt(head dim) if not given.")
    ] = None,
    softcap: Annotated[float | None, typer.Option(help="Bound of the scores.")] = None,
    bias: Annotated[str, typer.Option(help="none, pre_scale or post_scale.")] = "none",
    bias_shape: Annotated[
        str, typer.Option(help="Which of B,H,S,T the bias has, as in HST; 1 elsewhere.")
    ] = "HST",
    alibi: Annotated[bool, typer.Option("--alibi", help="With ALiBi slopes.")] = False,
    softmax: Annotated[str, typer.Option(help="vanilla, off-by-one or learnable.")] = "vanilla",
    dropout: Annotated[float, typer.Option(help="Probability that a weight is dropped.")] = 0.0,
    max_logit: Annotated[
        bool, typer.Option("--max-logit", help="Return the largest score per head.")
    ] = False,
    lse_grad: Annotated[
        bool, typer.Option("--lse-grad", help="lse may receive a gradient.")
    ] = False,
    deterministic: Annotated[bool, typer.Option(help="The same bits every run.")] = True,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Bits do not depend on the batch.")
    ] = False,
    backend: Annotated[str, typer.Option(help="auto, a name, or FORWARD,BACKWARD.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
) -> None:
    """Say which backend computes a problem, and why not each other one."""
    where = device_of(device)
    _choice("--dtype", dtype, tuple(DTYPES))
    _choice("--bias", bias, tuple(_BIAS))
    _choice("--packing", packing, get_args(Packing))
    options = Options(
        qkv_format=qkv_format,
        attn_mask_type=mask,
        window_size=_window(window),
        bottom_right_diagonal=bottom_right,
        softmax_scale=softmax_scale,
        softcap=softcap,
        bias_type=_BIAS[bias] or "post_scale_bias",
        softmax_type=softmax,
        dropout_p=dropout,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        max_logit=max_logit,
        lse_grad=lse_grad,
        packing=packing,  # type: ignore[arg-type] - checked
    )
    sizes = Sizes(
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_kv=seqlen_q if seqlen_kv is None else seqlen_kv,
        heads=heads,
        groups=groups or heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v or head_dim,
        dtype=DTYPES[dtype],
        bias_dims=None if _BIAS[bias] is None else _bias_dims(bias_shape),
        alibi=alibi,
    )
    _print(select(problem_of(options, sizes), where, backend, whole=True))


def _print(selection: Selection) -> None:
    print(f"{selection.problem.label()} on {selection.device}\n")
    chosen = {
        half: found.name
        for half, found in (("forward", selection.forward), ("backward", selection.backward))
        if found is not None
    }
    lines = []
    for line in selection.trace:
        halves = [half for half, name in chosen.items() if name == line.name]
        answer = " and ".join(halves) if halves else ("could" if line.support.ok else "no")
        reasons = "; ".join(map(str, line.support.reasons))
        if not halves and not reasons:
            reasons = f"{chosen.get('forward', 'another')} comes first"
        lines.append((line.name, answer, reasons or "-"))
    print_table(("backend", "chosen", "why not"), lines, sys.stdout)
    for name in selection.copies:
        print(f"copied: {name}, its last dim is not contiguous")


def _choice(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InvalidProblem(f"{option} is {value!r}, expected one of {', '.join(allowed)}")


def _window(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    try:
        left, right = map(int, text.split(","))
    except ValueError as error:
        raise InvalidProblem(f"--window is {text!r}, expected LEFT,RIGHT, as in 128,0") from error
    return left, right


def _bias_dims(text: str) -> str:
    if set(text.upper()) - set("BHST"):
        raise InvalidProblem(f"--bias-shape is {text!r}, expected some of B, H, S and T")
    return text.upper()
