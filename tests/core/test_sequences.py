"""Sequences as backends in plain torch walk them: places, blocks, and fp32 products that stay fp32."""

from __future__ import annotations

import pytest
import torch

from gradtruth.core import sequences as module
from gradtruth.core.precision import full_precision
from gradtruth.core.problem import Problem
from gradtruth.core.sequences import sequences
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs

CPU = torch.device("cpu")


@pytest.fixture(params=["host", "device"])
def reading(request, monkeypatch):
    if request.param == "device":
        monkeypatch.setattr(module, "known_on_host", lambda *_: False)
    return request.param


def packed(lengths, starts, tokens, bound=None, **spec):
    """thd problem with the same sequences on both sides; key t holds the number t."""
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    padded = torch.tensor([*starts, tokens]).int()
    q = torch.arange(tokens).float().view(tokens, 1, 1)
    inputs = Inputs(
        q=q,
        k=q,
        v=q,
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
    )
    return Problem.of(
        Spec(layout="thd", lengths="cu_seqlens", **spec), inputs, bound, bound
    ), inputs


@pytest.mark.parametrize("bound", [None, 4, 100])
def test_places_of_packed_sequences(reading, bound):
    lengths, starts, tokens = [3, 0, 4, 2], [1, 4, 6, 11], 13
    problem, inputs = packed(lengths, starts, tokens, bound)
    stored = inputs.q[None].masked_fill((inputs.q == 0)[None], torch.nan)
    for number, sequence in enumerate(sequences(problem, inputs)):
        side = sequence.kv
        places = torch.arange(tokens)[side.places]
        assert places.unique().numel() == len(side)
        valid = torch.ones(len(side), dtype=torch.bool) if side.valid is None else side.valid
        expected = [starts[number] + i for i in range(lengths[number])]
        assert places[valid].tolist() == expected
        assert side.at[valid].tolist() == list(range(lengths[number]))
        taken = side.take(stored)[:, 0, 0]
        assert taken[valid].tolist() == expected
        assert not taken[~valid].any()
        if reading == "host":
            assert len(side) == lengths[number]
        else:
            assert len(side) == min(tokens, bound or tokens)


def test_put_writes_valid_places_alone(reading):
    lengths, starts, tokens = [3, 4], [1, 6], 13
    problem, inputs = packed(lengths, starts, tokens, 4)
    stored = torch.full((1, tokens, 1), -1.0, dtype=torch.bfloat16)
    for number, sequence in enumerate(sequences(problem, inputs)):
        sequence.q.put(stored, torch.full((len(sequence.q), 1), number + 1.00390625))
    filled = {
        place: number + 1.0
        for number in (0, 1)
        for place in range(starts[number], starts[number] + lengths[number])
    }
    assert stored.flatten().tolist() == [filled.get(place, -1.0) for place in range(tokens)]


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("band", [(None, None), (None, 0), (2, 0), (1, 4), (0, None)])
@pytest.mark.parametrize("alignment", ["top_left", "bottom_right"])
def test_blocks_hold_every_visible_pair_once(reading, rows, band, alignment):
    S, T = 7, 11
    spec = Spec(left=band[0], right=band[1], alignment=alignment)
    inputs = Inputs(q=torch.zeros(1, S, 1, 1), k=torch.zeros(1, T, 1, 1), v=torch.zeros(1, T, 1, 1))
    problem = Problem.of(spec, inputs)
    off = T - S if alignment == "bottom_right" else 0
    expected = [
        (i, j) for i in range(S) for j in range(T) if spec.band.open or spec.band.visible(i, j, off)
    ]
    found, looked_at = [], 0
    for sequence in sequences(problem, inputs):
        for block in sequence.blocks(spec.band, rows):
            shape = (len(block.queries), len(block.keys))
            assert shape[0] <= rows
            assert torch.equal(sequence.kv.at[block.key_slice], block.keys.at)
            shown = torch.ones(shape, dtype=torch.bool)
            if block.banded:
                shown = spec.band.visible(block.queries.at[:, None], block.keys.at, block.diagonal)
                assert (
                    rows > 1 or reading == "device"
                )  # a single row has no key that it does not see
            where = shown.nonzero().tolist()
            found += [(block.queries.at[a].item(), block.keys.at[b].item()) for a, b in where]
            looked_at += shown.numel()
    assert sorted(found) == expected
    if reading == "host" and rows == 1:
        assert looked_at == len(expected)


def test_hidden_places_count_but_are_not_valid(reading):
    mask = torch.tensor([[True, False, True, False, True], [True] * 5])
    x = torch.ones(2, 5, 1, 1)
    inputs = Inputs(q=x, k=x, v=x, padding_mask_q=mask, padding_mask_kv=mask)
    first, second = sequences(Problem.of(Spec(lengths="padding_mask"), inputs), inputs)
    valid = first.q.valid
    assert first.q.at[valid].tolist() == [0, 2]
    assert torch.arange(5)[first.q.places][valid].tolist() == [1, 3]
    assert second.q.valid is None or not second.q.valid.any()


def _look_and_raise(problem, device, look):
    with full_precision(problem, device):
        look()
        raise KeyError


@pytest.mark.parametrize("allowed", [False, True])
@pytest.mark.parametrize("standing", ["highest", "high", "medium"])
@pytest.mark.parametrize("backend", ["mkldnn", "cuda"])
def test_full_precision_leaves_the_switch_as_it_was(monkeypatch, allowed, standing, backend):
    matmul = getattr(torch.backends, backend).matmul
    device = torch.device("cuda" if backend == "cuda" else "cpu")
    x = torch.zeros(1, 1, 1, 1)
    problem = Problem.of(Spec(allow_tf32=allowed), Inputs(q=x, k=x, v=x))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(standing)
    try:
        outside = matmul.fp32_precision
        seen = []
        with pytest.raises(KeyError):
            _look_and_raise(problem, device, lambda: seen.append(matmul.fp32_precision))
        assert matmul.fp32_precision == outside
        assert torch.get_float32_matmul_precision() == standing
    finally:
        torch.set_float32_matmul_precision(before)
    (inside,) = seen
    assert inside in ("ieee", "none", "tf32")
    if not allowed:
        assert inside != "tf32"
    elif outside == "tf32":
        assert inside == "tf32"


def test_full_precision_switches_autocast_off():
    x = torch.zeros(1, 1, 1, 1)
    problem = Problem.of(Spec(), Inputs(q=x, k=x, v=x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with full_precision(problem, CPU):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
