"""What reference and unfused have in common: the contract, against its definition pair by pair."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.backends.definition import Drawn, define, draw
from torch import Tensor

from gradtruth.backends import get
from gradtruth.backends.reference import backward as reference_backward
from gradtruth.backends.reference import forward as reference_forward
from gradtruth.backends.reference.schedule import Schedule
from gradtruth.core import sequences
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.support import DEFAULT_CLAIMS
from gradtruth.core.tensors import Forward, Inputs, Wanted
from gradtruth.core.tile import tile
from gradtruth.errors import InvalidProblem

NAMES = ("reference", "unfused")
CPU = torch.device("cpu")
# What is stored in fp32 also for fp64 problems, or may be.
SINGLE = {"max_logit", "dsoftmax_offset", "dbias"}
NOTHING = Wanted(*(False,) * 5)


@pytest.fixture(params=NAMES)
def backend(request):
    return get(request.param)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 rows, so that small problems have several and most lengths are no multiple."""
    for module in (reference_forward, reference_backward):
        monkeypatch.setattr(module, "schedule", lambda *_: Schedule(rows=4, scores=1 << 20))


@pytest.fixture(params=["host", "device"])
def reading(request, monkeypatch):
    """Lengths are read on the host, or stay on the device as on a GPU."""
    if request.param == "device":
        monkeypatch.setattr(sequences, "known_on_host", lambda p, _: p.spec.lengths == "full")
    return request.param


@cache
def defined(seed: int, dtype: torch.dtype) -> tuple[Drawn, dict[str, Tensor]]:
    drawn = draw(seed, dtype=dtype)
    return drawn, define(drawn)


def results(drawn: Drawn, backend, forward: Forward | None = None) -> dict[str, Tensor]:
    forward = forward or backend.forward(drawn.problem, drawn.inputs)
    grads = drawn.backward(backend, poisoned(drawn, forward))
    found = {"out": forward.out, "lse": forward.lse, **dict(grads.items())}
    return found if forward.max_logit is None else {**found, "max_logit": forward.max_logit}


def outside_lse(drawn: Drawn) -> Tensor:
    """bool like lse, True outside every sequence."""
    outside = drawn.dout.isnan().any(-1)
    order = {"bshd": (0, 2, 1), "sbhd": (1, 2, 0), "thd": (0, 1)}[drawn.problem.layout]
    return outside.permute(order)


def poisoned(drawn: Drawn, forward: Forward) -> Forward:
    """The same out and lse with NaN outside every sequence."""
    outside = drawn.dout.isnan().any(-1, keepdim=True)
    return Forward(
        out=forward.out.masked_fill(outside, torch.nan),
        lse=forward.lse.masked_fill(outside_lse(drawn), torch.nan),
    )


def compare(
    found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float, single: float
) -> None:
    assert set(found) == set(wanted)
    for name, right in wanted.items():
        left = found[name].double()
        assert left.shape == right.shape, name
        finite = right.isfinite()
        assert torch.equal(left[~finite], right[~finite]), name
        largest = max([1.0, *right[finite].abs().tolist()])
        error = (left - right)[finite].abs()
        assert (error <= largest * (single if name in SINGLE else tolerance)).all(), (
            name,
            error.max(),
        )


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return set(left) == set(right) and all(
        torch.equal(left[n].reshape(-1).view(torch.uint8), right[n].reshape(-1).view(torch.uint8))
        for n in left
    )


def plain(dtype: torch.dtype = torch.float32, seed: int = 0, **spec) -> Drawn:
    """Two full sequences, 11 x 13, without any feature but those of ``spec``."""
    none = {
        "layout": "bshd", "lengths": "full", "left": None, "right": None, "arbitrary": False, "scale": None,
        "softcap": None, "bias": "none", "alibi": False, "softmax": "vanilla", "dropout_p": 0.0, "max_logit": False,
        "lse_grad": False, "B": 2, "S": 11, "T": 13, "H": 4, "G": 2, "D": 8, "Dv": 3,
    }  # fmt: skip
    return draw(seed, dtype=dtype, **(none | spec))


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("seed", range(60))
def test_definition(backend, reading, seed):
    drawn, wanted = defined(seed, torch.float64)
    compare(results(drawn, backend), wanted, 1e-13, 1e-6)


@pytest.mark.parametrize("seed", range(200, 210))
def test_definition_in_fp32(backend, reading, seed):
    drawn, wanted = defined(seed, torch.float32)
    compare(results(drawn, backend), wanted, 2e-6, 2e-6)


def test_the_drawn_problems_reach_every_feature():
    specs = [draw(seed).problem.spec for seed in range(60)]
    for field, least in (
        ("layout", 3),
        ("lengths", 3),
        ("bias", 3),
        ("softmax", 3),
        ("dropout_p", 3),
        ("softcap", 2),
    ):
        assert len({getattr(spec, field) for spec in specs}) == least, field
    assert {(s.left is None, s.right is None) for s in specs} == {
        (a, b) for a in (0, 1) for b in (0, 1)
    }
    assert (
        {s.arbitrary for s in specs}
        == {s.alibi for s in specs}
        == {s.lse_grad for s in specs}
        == {False, True}
    )


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
@pytest.mark.parametrize(("B", "S", "T"), [(0, 4, 4), (2, 0, 4), (2, 4, 0), (2, 0, 0)])
@pytest.mark.parametrize("softmax", ["vanilla", "learnable"])
def test_nothing_to_attend(backend, reading, layout, B, S, T, softmax):
    shapes = [(B, n, 2, 8) if layout == "bshd" else (n, B, 2, 8) for n in (S, T, T)]
    lengths = {}
    if layout == "thd":
        shapes = [(n * B, 2, 8) for n in (S, T, T)]
        for side, n in (("q", S), ("kv", T)):
            lengths[f"cu_seqlens_{side}"] = torch.arange(B + 1, dtype=torch.int32) * n
    sink = torch.tensor([0.5, -1.0]) if softmax == "learnable" else None
    inputs = Inputs(*(torch.randn(shape) for shape in shapes), softmax_offset=sink, **lengths)
    spec = Spec(
        layout=layout, lengths="cu_seqlens" if lengths else "full", softmax=softmax, max_logit=True
    )
    problem = Problem.of(spec, inputs)
    found = backend.forward(problem, inputs)
    assert found.out.shape == inputs.q.shape
    assert not found.out.any()
    rows = found.lse.reshape(-1, 2) if layout == "thd" else found.lse.transpose(1, 2).reshape(-1, 2)
    assert torch.equal(
        rows, (torch.full((2,), -torch.inf) if sink is None else sink).expand(B * S, 2)
    )
    assert torch.equal(found.max_logit, torch.full((2,), -torch.inf))
    grads = backend.backward(
        problem, inputs, found, torch.randn_like(found.out), torch.randn_like(found.lse), Wanted()
    )
    assert {name for name, _ in grads.items()} == {"dq", "dk", "dv"} | (
        {"dsoftmax_offset"} if sink is not None else set()
    )
    assert not any(grad.any() for _, grad in grads.items())


def test_softcap_bounds_an_infinite_bias(backend):
    drawn = plain(bias="pre_scale", softcap=2.0, B=1, D=1)
    shape = (1, 1, 1, 13)
    bias = torch.zeros(shape).masked_fill(torch.arange(13) == 5, -torch.inf)
    inputs = replace(drawn.inputs, bias=bias, q=torch.zeros_like(drawn.inputs.q))
    problem = Problem.of(drawn.problem.spec, inputs)
    found = backend.forward(problem, inputs)
    expected = torch.log(torch.tensor(12.0) + torch.exp(torch.tensor(-2.0)))
    torch.testing.assert_close(found.lse, expected.expand(1, 4, 11), rtol=0, atol=5e-7)


def test_dropout_of_everything(backend):
    drawn = plain(dropout_p=1.0)
    found = results(drawn, backend)
    assert all(not found[name].any() for name in ("out", "dq", "dk", "dv"))
    assert found["lse"].isfinite().all()


def test_dropout_without_a_seed_is_refused(backend):
    drawn = plain(dropout_p=0.5)
    with pytest.raises(InvalidProblem, match="dropout_seed is None"):
        backend.forward(drawn.problem, replace(drawn.inputs, dropout_seed=None))


@pytest.mark.parametrize(
    "feature", [{}, {"dropout_p": 0.3}, {"softcap": 1.5}, {"bias": "post_scale"}]
)
@pytest.mark.parametrize("cut", [1, 6, 12])
def test_tiles_of_the_keys_add_up(backend, reading, feature, cut):
    """A backward of a tile takes the out and lse of the whole, as a ring does."""
    drawn = plain(torch.float64, right=3, **feature)
    whole = backend.forward(drawn.problem, drawn.inputs)
    wanted = drawn.backward(backend, whole)
    parts = []
    for keys in ((0, cut), (cut, 13)):
        problem, inputs = tile(drawn.problem, drawn.inputs, keys=keys)
        parts.append(backend.backward(problem, inputs, whole, drawn.dout, drawn.dlse, Wanted()))
    for name, right in wanted.items():
        left = sum(getattr(part, name) for part in parts)
        torch.testing.assert_close(left, right, rtol=0, atol=1e-6 if name in SINGLE else 1e-13)


@pytest.mark.parametrize("seed", range(300, 306))
def test_only_what_is_wanted(backend, seed):
    drawn, names = (
        draw(seed, bias="post_scale", softmax="learnable"),
        ("dq", "dk", "dv", "dbias", "dsoftmax_offset"),
    )
    found = backend.forward(drawn.problem, drawn.inputs)
    everything = dict(drawn.backward(backend, found).items())
    for name in names:
        alone = dict(drawn.backward(backend, found, replace(NOTHING, **{name: True})).items())
        assert same_bits(alone, {name: everything[name]})
    assert not dict(drawn.backward(backend, found, NOTHING).items())


# ---------------------------------------------------------------- guarantees


def test_claims(backend):
    full, ragged = plain().problem, plain(lengths="cu_seqlens").problem
    gpu = torch.device("cuda", 0)
    everything = replace(DEFAULT_CLAIMS, batch_invariant=True)
    for problem in (full, ragged):
        assert backend.supports(problem, CPU).ok
        assert backend.supports(problem, gpu).ok
        assert backend.claims(problem, CPU) == everything
    assert backend.claims(full, gpu) == everything
    assert backend.claims(ragged, gpu) == DEFAULT_CLAIMS


@pytest.mark.parametrize("seed", range(400, 410))
def test_same_bits_again_and_inputs_unchanged(backend, reading, seed):
    drawn = draw(seed, dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in drawn.inputs.items()}
    first = results(drawn, backend)
    results(draw(seed + 1, dtype=torch.bfloat16), backend)
    assert same_bits(first, results(drawn, backend))
    assert same_bits(before, dict(drawn.inputs.items()))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("seed", range(420, 426))
def test_no_memory_is_read_before_it_is_written(backend, reading, seed):
    drawn, wanted = defined(seed, torch.float64)
    compare(results(drawn, backend), wanted, 1e-13, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_a_sequence_does_not_depend_on_its_batch(backend, dtype, softcap):
    """Alone, right-padded, left-padded or in thd: the same bits on the CPU."""
    generator = torch.Generator().manual_seed(0)
    S, T, width = 9, 21, 40
    one = [
        torch.randn(1, n, h, 16, generator=generator).to(dtype)
        for n, h in ((S, 4), (T, 2), (T, 2), (S, 4))
    ]
    spec = Spec(right=0, left=12, alignment="bottom_right", softcap=softcap)

    def attend(spec, q, k, v, dout, **lengths):
        inputs = Inputs(q=q, k=k, v=v, **lengths)
        problem = Problem.of(spec, inputs)
        found = backend.forward(problem, inputs)
        grads = backend.backward(problem, inputs, found, dout, None, Wanted())
        return found.out, grads.dq, grads.dk, grads.dv

    expected = attend(spec, *one)
    other = [torch.randn(1, width, x.shape[2], 16, generator=generator).to(dtype) for x in one]
    for start in (0, width - T):
        padded = [torch.cat([torch.full_like(y, torch.nan), y]) for y in other]
        masks = torch.ones(2, 2, width, dtype=torch.bool)
        masks[:, 1, 3:] = False
        for x, y, side in zip(one, padded, (0, 1, 1, 0), strict=True):
            y[0, start : start + x.shape[1]] = x[0]
            masks[side, 0, start : start + x.shape[1]] = False
        given = {"padding_mask_q": masks[0], "padding_mask_kv": masks[1]}
        found = attend(replace(spec, lengths="padding_mask"), *padded, **given)
        for left, right in zip(found, expected, strict=True):
            assert torch.equal(left[0, start : start + right.shape[1]], right[0])
    packed = [torch.cat([y[0], x[0]]) for x, y in zip(one, other, strict=True)]
    cu = {
        f"cu_seqlens_{s}": torch.tensor([0, width, width + n]).int()
        for s, n in (("q", S), ("kv", T))
    }
    found = attend(replace(spec, layout="thd", lengths="cu_seqlens"), *packed, **cu)
    for left, right in zip(found, expected, strict=True):
        assert torch.equal(left[width:], right[0])


@pytest.mark.parametrize("name", ["q", "k", "v", "dout"])
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_nan_stays_in_its_sequence_and_kv_head(backend, reading, name, layout):
    lengths = "cu_seqlens"
    drawn = plain(seed=3, layout=layout, lengths=lengths, right=0, alignment="bottom_right", B=3)
    n = max(range(3), key=lambda n: min(p.length for p in drawn.places[n]))
    queries, keys = drawn.places[n]
    side = queries if name in ("q", "dout") else keys
    assert queries.length
    assert keys.length
    clean = results(drawn, backend)
    tensor = (drawn.dout if name == "dout" else getattr(drawn.inputs, name)).clone()
    of_rows = tensor if layout == "thd" else tensor[side.row]
    at = side.start + side.length - 1 if side is queries else side.start
    of_rows[at, -1] = torch.nan  # the last head, which belongs to the last group
    if name == "dout":
        drawn.dout = tensor
    else:
        drawn.inputs = replace(drawn.inputs, **{name: tensor})
    spoilt = results_given(drawn, backend)
    reached = False
    for which, right in clean.items():
        left = spoilt[which]
        where, heads = (queries, 4) if which in ("out", "dq") else (keys, 2)
        if which == "lse":
            continue
        own = torch.zeros(left.shape, dtype=torch.bool)
        rows = own if layout == "thd" else own[where.row]
        rows[where.start : where.start + where.length, heads // 2 :] = True
        assert torch.equal(left[~own], right[~own]), which
        reached |= bool(left[own].isnan().any())
    assert reached


def results_given(drawn: Drawn, backend) -> dict[str, Tensor]:
    forward = backend.forward(drawn.problem, drawn.inputs)
    return {
        "out": forward.out,
        "lse": forward.lse,
        **dict(drawn.backward(backend, forward).items()),
    }


@pytest.mark.parametrize("softmax", ["vanilla", "off-by-one", "learnable"])
@pytest.mark.parametrize("value", [-1.0, -torch.inf])
def test_exact_zeros(backend, reading, softmax, value):
    """Rows that see nothing, and padding, are +0 bit for bit, whatever the keys beside them hold."""
    features = {"right": 0, "alignment": "bottom_right", "softmax": softmax, "lse_grad": True}
    drawn = plain(seed=22, lengths="padding_mask", S=15, T=15, D=3, **features)
    unseen = [max(0, queries.length - keys.length) for queries, keys in drawn.places]
    both = [n % 4 and keys.length for n, (_, keys) in zip(unseen, drawn.places, strict=True)]
    assert any(both)  # a block of four rows holds rows of both kinds
    k, v = (torch.where(x.isnan(), x, value) for x in (drawn.inputs.k, drawn.inputs.v))
    drawn.inputs = replace(drawn.inputs, k=k, v=v)
    found = backend.forward(drawn.problem, drawn.inputs)
    grads = drawn.backward(backend, found)
    outside = drawn.dout.isnan().any(-1)
    blank = outside.clone()
    for (queries, _), rows in zip(drawn.places, unseen, strict=True):
        blank[queries.row, queries.start : queries.start + rows] = True
    assert not found.out.view(torch.int32)[blank].any()
    assert not grads.dq.view(torch.int32)[blank].any()
    assert (found.lse.transpose(1, 2)[outside] == -torch.inf).all()
    hidden = drawn.inputs.padding_mask_kv
    assert hidden.any()
    assert not grads.dk.view(torch.int32)[hidden].any()
    assert not grads.dv.view(torch.int32)[hidden].any()


@pytest.mark.parametrize("seed", range(500, 510))
def test_any_strides(backend, seed):
    drawn = draw(seed, dtype=torch.float32, layout="bshd")
    expected = results(drawn, backend)
    for order in ((3, 1, 0, 2), (2, 3, 1, 0)):
        back = [order.index(d) for d in range(4)]
        moved = {
            n: getattr(drawn.inputs, n).permute(order).contiguous().permute(back)
            for n in ("q", "k", "v")
        }
        again = replace_inputs(drawn, **moved)
        again.dout = drawn.dout.permute(order).contiguous().permute(back)
        assert same_bits(results(again, backend), expected)


def replace_inputs(drawn: Drawn, **tensors: Tensor) -> Drawn:
    return replace(drawn, inputs=replace(drawn.inputs, **tensors))


def test_expanded_tensors(backend):
    drawn = plain()
    one = replace_inputs(
        drawn,
        k=drawn.inputs.k[:, :, :1].expand(-1, -1, 2, -1),
        v=drawn.inputs.v[:1].expand(2, -1, -1, -1),
    )
    one.dout = torch.ones(()).expand(drawn.dout.shape)
    own = replace_inputs(one, k=one.inputs.k.contiguous(), v=one.inputs.v.contiguous())
    own.dout = one.dout.contiguous()
    assert same_bits(results(one, backend), results(own, backend))


def test_results_are_fresh_and_contiguous(backend):
    for layout in ("bshd", "sbhd", "thd"):
        drawn = draw(7, layout=layout, dtype=torch.float32)
        for name, tensor in results(drawn, backend).items():
            wanted = tensor.t() if layout == "thd" and name == "lse" else tensor
            assert wanted.is_contiguous(), (layout, name)


def test_autocast_and_default_dtype_change_nothing(backend):
    drawn = plain(torch.float64, dropout_p=0.3)
    single = plain(torch.float32, dropout_p=0.3)
    expected, expected_single = results(drawn, backend), results(single, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(results(drawn, backend), expected)
        assert same_bits(results(single, backend), expected_single)
    torch.set_default_dtype(torch.float64)
    try:
        assert same_bits(results(single, backend), expected_single)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("seed", range(5))
def test_no_length_is_read_off_the_host(backend, seed):
    """Meta tensors have no content, so that reading any raises."""
    drawn = draw(seed, dtype=torch.float16)
    meta = Inputs(**{name: tensor.to("meta") for name, tensor in drawn.inputs.items()})
    dout, dlse = drawn.dout.to("meta"), None if drawn.dlse is None else drawn.dlse.to("meta")
    found = backend.forward(drawn.problem, meta)
    grads = dict(backend.backward(drawn.problem, meta, found, dout, dlse, Wanted()).items())
    assert {tensor.device.type for tensor in (found.out, found.lse, *grads.values())} == {"meta"}
    assert {"dq", "dk", "dv"} <= set(grads)


def test_hostile_tiles_stay_inside(backend, reading):
    """Extents whose index lies outside a bias are read and written in memory."""
    x = torch.randn(1, 4, 1, 2)
    inputs = Inputs(q=x, k=x, v=x, bias=torch.randn(1, 1, 4, 4))
    problem, tiled = tile(Problem.of(Spec(bias="post_scale"), inputs), inputs)
    packed = tiled.extents.clone()
    packed[5:7] = torch.tensor([[3], [-2]])  # index_q, index_kv
    tiled = replace(tiled, extents=packed)
    found = backend.forward(problem, tiled)
    dbias = backend.backward(problem, tiled, found, x, None, Wanted()).dbias
    assert dbias.shape == (1, 1, 4, 4)
    assert dbias[0, 0, 3, :2].all()
    assert not dbias[0, 0, :3].any()
    assert not dbias[0, 0, :, 2:].any()
