"""The probes' right results, read off without a reference; tags; and what Gaussian noise does not show."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Forward
from gradtruth.errors import InvalidProblem
from gradtruth.verify.suite.conformance import examine, named, truth_of
from gradtruth.verify.suite.families import FAMILIES, values
from gradtruth.verify.suite.inputs import make
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.tags import read_tags, tags

REFERENCE = get("reference")


def problem(spec: Spec | None = None, *, batch=2, s=7, t=7, heads=(4, 2), d=8, dtype="float32"):
    return Problem(
        spec=Spec(right=0) if spec is None else spec,
        batch=batch,
        seqlen_q=s,
        seqlen_kv=t,
        num_heads=heads[0],
        num_gqa_groups=heads[1],
        head_dim_qk=d,
        head_dim_v=d,
        dtype=dtype,
    )


def run(family: str, what: Problem, backend=REFERENCE):
    sample = make(Recipe(problem=what, family=family, seed=3))
    forward = backend.forward(sample.problem, sample.inputs)
    grads = backend.backward(
        sample.problem, sample.inputs, forward, sample.dout, None, sample.wanted
    )
    return sample, named(forward, grads)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_uniform_counts_the_visible_keys():
    sample, found = run("uniform", problem())
    count = torch.arange(1.0, 8.0)
    close(found["lse"], count.log().expand(2, 4, 7))
    mean = sample.inputs.v.cumsum(1) / count[:, None, None]
    close(found["out"], mean.repeat_interleave(2, 2))


def test_maskprobe_shows_the_mask_in_out_and_in_dv():
    _, found = run("maskprobe", problem(heads=(2, 2), d=9))
    mask = torch.ones(7, 7).tril()
    weights = mask / mask.sum(1, keepdim=True)
    for n in range(2):
        for h in range(2):
            close(found["out"][n, :, h, :7], weights)
            close(found["dv"][n, :, h, :7], weights.T)


def test_dropprobe_shows_one_mask_in_out_and_in_dv():
    _, found = run("dropprobe", problem(Spec(right=0, dropout_p=0.5), heads=(2, 2), d=9))
    out = found["out"][..., :7]
    close(found["dv"][..., :7], out.transpose(1, 3))
    count = torch.arange(1.0, 8.0)[:, None, None]
    kept = out * count / 2
    assert 0.2 < kept.sum() / 112 < 0.8
    close(kept, kept.round().clamp(0, 1))


def test_gqaprobe_gives_integers():
    _, found = run("gqaprobe", problem(Spec(), heads=(6, 2), s=4, t=4))
    close(found["dv"][:, :, 0], torch.full((2, 4, 8), 6.0))
    close(found["dv"][:, :, 1], torch.full((2, 4, 8), 15.0))


def test_onekey_needs_no_reference():
    sample, found = run("onekey", problem(Spec(), s=5, t=1))
    close(found["out"], sample.inputs.v.expand(2, 5, 2, 8).repeat_interleave(2, 2))
    close(found["dv"], sample.dout.unflatten(2, (2, 2)).sum((1, 3))[:, None])
    assert found["dq"].abs().max() < 1e-5
    assert found["dk"].abs().max() < 1e-5
    assert sample.inputs.v.abs().max() > 3


@pytest.mark.parametrize("dims", [8, 64, 128])
def test_neglogit_scores_overflow_a_lane_that_scores_0(dims):
    _, found = run("neglogit", problem(d=dims))
    assert (found["lse"] < -110).all()
    assert torch.exp(-found["lse"]).isinf().all()
    assert all(tensor.isfinite().all() for tensor in found.values())


def test_large_logits_are_near_100_on_both_sides():
    sample = make(Recipe(problem=problem(Spec(), batch=4, d=64), family="large_logits"))
    k = sample.inputs.k.repeat_interleave(2, 2)
    scores = torch.einsum("nihd,njhd->nhij", sample.inputs.q, k) / 8
    assert ((scores.abs() - 100).abs() < 6).all()
    signs = scores.sign().amax((2, 3))
    assert torch.equal(signs, scores.sign().amin((2, 3)))
    assert signs.unique().tolist() == [-1, 1]


def test_taildim_lies_in_the_last_columns():
    sample, found = run("taildim", problem(d=9))
    for name in ("q", "k"):
        assert not getattr(sample.inputs, name)[..., :4].any()
        assert getattr(sample.inputs, name)[..., 4:].all()
        assert not found[f"d{name}"][..., :4].any()
        assert found[f"d{name}"][..., 4:].any()
    narrow = values("taildim", "q", (1, 2, 1, 1), 0)
    assert narrow.all()


# ---------------------------------------------------------------- tags


SHAPE = (3, 50, 8, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tags_give_their_index_back(dtype):
    found = read_tags(tags("k", SHAPE, 5).to(dtype), "k", SHAPE, 5)
    for dim, size in enumerate(SHAPE):
        at = torch.arange(size).view([-1 if d == dim else 1 for d in range(4)])
        assert torch.equal(found[..., dim], at.expand(SHAPE))


def test_what_is_no_tag_is_known():
    shape = (1, 3, 1, 5)
    mine, other = tags("q", shape, 0), tags("v", shape, 0)
    given = torch.stack([mine[0, 2, 0, 4], mine[0, 0, 0, 0] + 2**-30, other[0, 1, 0, 1]])
    given = torch.cat([given, torch.tensor([torch.nan, torch.inf, 3.0, -1.5])])
    assert read_tags(given, "q", shape, 0).tolist() == [[0, 2, 0, 4], *[[-1] * 4] * 6]


@pytest.mark.parametrize("shape", [SHAPE, (2, 7, 3, 8), (4, 987, 1, 1), (2, 128, 16, 256)])
def test_neighbouring_tags_differ_in_bf16(shape):
    found = tags("v", shape, 1).float().bfloat16()
    for dim, size in enumerate(shape):
        for step in range(1, min(9, size)):
            near = found.narrow(dim, step, size - step) != found.narrow(dim, 0, size - step)
            assert near.all(), (dim, step)


def test_tags_that_are_rounded_or_too_many_are_refused():
    with pytest.raises(InvalidProblem, match=r"dtype torch.bfloat16"):
        read_tags(tags("q", SHAPE, 0).bfloat16(), "q", SHAPE, 0)
    with pytest.raises(InvalidProblem, match="at most 2"):
        read_tags(torch.zeros(1), "q", (2, 4096, 64, 64), 0)


def test_a_swapped_head_is_named_by_its_tags():
    """Each row sees one key, so out is v: tags say which v."""
    what = problem(Spec(left=0, right=0), heads=(4, 4))
    sample = make(Recipe(problem=what, family="tagged"))
    shape = (2, 7, 4, 8)
    right = REFERENCE.forward(sample.problem, sample.inputs).out
    index = read_tags(right, "v", shape, 0)
    assert torch.equal(index[1, 2, 3, 4], torch.tensor([1, 2, 3, 4]))
    swapped = read_tags(right[:, :, [0, 2, 1, 3]], "v", shape, 0)
    assert swapped[0, 0, :, 0, 2].tolist() == [0, 2, 1, 3]


# ---------------------------------------------------------------- families


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_same_bits_on_a_gpu(family):
    for role, shape in product("qkv", (SHAPE, (1, 1, 1, 1), (2, 0, 3, 8))):
        there = values(family, role, shape, 7, "cuda")
        assert there.is_cuda
        assert torch.equal(there.cpu(), values(family, role, shape, 7))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_right_for_reference_in_bf16(family):
    """Also that its budget can be kept: the probes' exact zeros and cancellations included."""
    sample = make(Recipe(problem=problem(dtype="bfloat16", d=32), family=family, seed=1))
    assert examine(sample, get("reference"), truth_of(sample)) == []


def test_the_page_lists_every_family():
    page = (Path(__file__).parents[2] / "docs/families.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(FAMILIES)


class NeighboursDelta:
    """delta = dout . out of sequence 0 serves every sequence: invisible in a batch of one."""

    name = "planted"

    def __getattr__(self, name):
        return getattr(REFERENCE, name)

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        delta = (dout.float() * forward.out.float()).sum(-1)
        shift = (delta - delta[:1]).transpose(1, 2)
        moved = shift if dlse is None else dlse + shift
        spec = replace(problem.spec, lse_grad=True)
        return REFERENCE.backward(
            replace(problem, spec=spec), inputs, Forward(out=forward.out, lse=forward.lse),
            dout, moved.contiguous(), wanted,
        )  # fmt: skip


def test_a_mix_up_that_gaussian_noise_hides_at_a_usual_tolerance():
    """delta averages out in noise: what is left passes where real activations would be ruined."""
    what = problem(Spec(right=0), batch=2, s=160, t=160, heads=(2, 1), d=64, dtype="bfloat16")
    worst = {}
    for family in ("gaussian", "heterogeneous"):
        scale = 0.1 if family == "gaussian" else 1.0
        sample = make(Recipe(problem=what, family=family, seed=2))
        inputs = replace(sample.inputs, **{n: getattr(sample.inputs, n) * scale for n in "qkv"})
        sample = replace(sample, inputs=inputs, dout=sample.dout * scale)
        forward = REFERENCE.forward(sample.problem, sample.inputs)
        given = (sample.problem, sample.inputs, forward, sample.dout, None, sample.wanted)
        right, wrong = REFERENCE.backward(*given), NeighboursDelta().backward(*given)
        tolerance = 1.5e-2 + 1.5e-2 * right.dq.abs()
        worst[family] = float(((wrong.dq - right.dq).abs() / tolerance).max())
        if family == "heterogeneous":
            found = examine(sample, NeighboursDelta(), truth_of(sample))
            assert any(line.startswith("dq is wrong") for line in found)
    assert worst["gaussian"] < 1
    assert worst["heterogeneous"] > 10
    assert math.isfinite(worst["heterogeneous"])
