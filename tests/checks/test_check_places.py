"""exact_zeros, shielded, outside_unchanged, inputs_unchanged, strides: health passes, planted faults do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.checks.small_cases import answers, dense, details, kinds, packed, padded
from tests.mutants.wrap import Wrapped

from gradtruth.verify.checks.check import NotReached
from gradtruth.verify.checks.exact_zeros import EXACT_ZEROS
from gradtruth.verify.checks.inputs_unchanged import INPUTS_UNCHANGED
from gradtruth.verify.checks.outside_unchanged import OUTSIDE_UNCHANGED
from gradtruth.verify.checks.shielded import SHIELDED
from gradtruth.verify.checks.strides import STRIDES

EVERYWHERE = {check.name: check for check in (OUTSIDE_UNCHANGED, INPUTS_UNCHANGED, STRIDES)}
WITH_PLACES = {check.name: check for check in (EXACT_ZEROS, SHIELDED)}


@pytest.mark.parametrize("check", EVERYWHERE | WITH_PLACES)
@pytest.mark.parametrize("make", [packed, padded])
@pytest.mark.parametrize("own", ["reference", "unfused"])
def test_health_passes_with_places_outside(check, make, own):
    assert answers(make(), Wrapped(own), (EVERYWHERE | WITH_PLACES)[check]) == []


@pytest.mark.parametrize("check", EVERYWHERE)
def test_health_passes_without(check):
    assert answers(dense(lse_grad=True), Wrapped(), EVERYWHERE[check]) == []


# ---------------------------------------------------------------- exact_zeros


def test_where_everything_contributes_there_is_nothing_to_see():
    assert answers(dense(), Wrapped(), EXACT_ZEROS) == [
        NotReached("something contributes to every element")
    ]


PLACES = {
    "out in a gap": ("forward", "out", 1, 0.5),
    "lse in a gap": ("forward", "lse", 1, 0.0),
    "dq in the tail": ("backward", "dq", 11, torch.nan),
    "dk in a gap": ("backward", "dk", 3, 1e-4),
    "dv in the tail": ("backward", "dv", 11, torch.inf),
    "the sign of a zero": ("backward", "dq", 11, -0.0),
}


def written(half, name, row, value, **claims):
    class Writes(Wrapped):
        def change_forward(self, found, problem, inputs):
            if half == "forward":
                getattr(found, name)[row] = value
            return found

        def change_backward(self, found, inputs, forward, dout):
            if half == "backward":
                getattr(found, name)[row] = value
            return found

    return Writes(**claims)


@pytest.mark.parametrize("where", PLACES)
def test_what_stands_outside_every_sequence_is_found_where_zeros_are_promised(where):
    half, name, row, value = PLACES[where]
    assert kinds(packed(), written(half, name, row, value), EXACT_ZEROS) == {(name, "nonzero")}
    unclaimed = written(half, name, row, value, exact_zeros=False)
    assert kinds(packed(), unclaimed, EXACT_ZEROS) == set()


def test_keys_that_no_query_sees_have_no_gradient_whatever_is_promised():
    backend = written("backward", "dk", 1, 1e-4, exact_zeros=False)
    assert kinds(packed(), backend, EXACT_ZEROS) == {("dk", "nonzero")}


# ---------------------------------------------------------------- shielded


def test_one_sequence_that_fills_its_place_has_no_neighbours():
    assert answers(dense(batch=1), Wrapped(), SHIELDED) == [
        NotReached("every place belongs to the one sequence")
    ]


class PaddingTimesZero(Wrapped):
    """Keys behind the end have weight 0, and 0 times NaN is NaN."""

    def change_backward(self, found, inputs, forward, dout):
        found.dq.add_(0.0 * inputs.k[:, 9:].sum())
        return found


class NeighbourTimesZero(Wrapped):
    """Every sequence reads the first one's first value."""

    def change_forward(self, found, problem, inputs):
        return replace(found, out=found.out + 0.0 * inputs.v[0, 0, 0, 0])


def test_padding_that_reaches_a_gradient_is_found_where_shields_are_promised():
    assert kinds(padded(), PaddingTimesZero(), SHIELDED) == {("dq", "nonfinite")}
    assert kinds(padded(), PaddingTimesZero(shielded=False), SHIELDED) == set()


def test_another_sequence_that_reaches_out_is_found():
    case = dense()
    assert ("out", "nonfinite") in kinds(case, NeighbourTimesZero(), SHIELDED)
    found = details(case, NeighbourTimesZero(), SHIELDED)
    assert all("a finite sequence 0" in text for text in found)


def test_a_large_number_in_padding_is_found_as_well_as_nan():
    class Large(Wrapped):
        def change_backward(self, found, inputs, forward, dout):
            stray = inputs.k[0, 10, 0, 0]
            found.dv.add_(1e-30 * stray if stray.isfinite() else 0.0)
            return found

    found = details(padded(), Large(), SHIELDED)
    assert found
    assert all("1e+30" in text for text in found)


# ---------------------------------------------------------------- outside_unchanged


def _write(tensor, at, value=3.0):
    """One element of the storage, counted from the tensor's first one."""
    at += tensor.storage_offset()
    if 0 <= at < tensor.untyped_storage().nbytes() // tensor.element_size():
        torch.as_strided(tensor, (1,), (1,), at).fill_(value)


BESIDE = {
    "before q": ("forward", lambda i, f, d: _write(i.q, -1), "q"),
    "behind v": ("forward", lambda i, f, d: _write(i.v, i.v.numel()), "v"),
    "behind dout": ("backward", lambda i, f, d: _write(d, d.numel()), "dout"),
    "behind out": ("backward", lambda i, f, d: _write(f.out, f.out.numel()), "out"),
    "before lse": ("backward", lambda i, f, d: _write(f.lse, -1), "lse"),
}


@pytest.mark.parametrize("where", BESIDE)
def test_one_element_beside_a_tensor_is_found(where):
    half, write, name = BESIDE[where]

    class Writes(Wrapped):
        def change_forward(self, found, problem, inputs):
            if half == "forward":
                write(inputs, None, None)
            return found

        def change_backward(self, found, inputs, forward, dout):
            if half == "backward":
                write(inputs, forward, dout)
            return found

    assert kinds(dense(), Writes(), OUTSIDE_UNCHANGED) == {(name, "written")}


def test_one_element_between_the_rows_of_a_view_is_found():
    case = dense()
    wide = torch.zeros(2, 12, 2, 24, dtype=torch.bfloat16)
    wide[..., :16] = case.inputs.k
    case = replace(case, inputs=replace(case.inputs, k=wide[..., :16]))

    class PaddedHead(Wrapped):
        def change_forward(self, found, problem, inputs):
            if inputs.k.stride(-2) > 16:
                _write(inputs.k, 16)
            return found

    assert kinds(case, Wrapped(), OUTSIDE_UNCHANGED) == set()
    assert kinds(case, PaddedHead(), OUTSIDE_UNCHANGED) == {("k", "written")}


class BehindItsResult(Wrapped):
    def change_backward(self, found, inputs, forward, dout):
        dk = torch.empty_like(found.dk).copy_(found.dk)
        _write(dk, dk.numel())
        return replace(found, dk=dk)


class BehindItsScratch(Wrapped):
    def change_forward(self, found, problem, inputs):
        _write(torch.zeros(5), 5)
        return found


def test_writes_beside_results_and_scratch_are_found():
    assert kinds(dense(), BehindItsResult(), OUTSIDE_UNCHANGED) == {("dk", "written")}
    assert kinds(dense(), BehindItsScratch(), OUTSIDE_UNCHANGED) == {(None, "written")}
    assert details(dense(), BehindItsScratch(), OUTSIDE_UNCHANGED) == [
        "4 bytes beside a fresh tensor [5] were written"
    ]


def test_a_backend_that_runs_under_no_dispatch_mode_still_has_guarded_inputs():
    class Refuses(Wrapped):
        def change_forward(self, found, problem, inputs):
            if torch._C._len_torch_dispatch_stack():
                raise NotImplementedError("no rule for this mode")
            _write(inputs.v, inputs.v.numel())
            return found

    assert kinds(dense(), Refuses(), OUTSIDE_UNCHANGED) == {("v", "written")}


# ---------------------------------------------------------------- inputs_unchanged


GIVEN = {
    "q": ("forward", lambda i, f, d: i.q.mul_(2)),
    "v": ("backward", lambda i, f, d: i.v.mul_(2)),
    "dout": ("backward", lambda i, f, d: d.zero_()),
    "out": ("backward", lambda i, f, d: f.out.zero_()),
    "lse": ("backward", lambda i, f, d: f.lse.add_(1)),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_tensor_that_was_given_and_is_written_is_found(name):
    half, write = GIVEN[name]

    class Writes(Wrapped):
        def change_forward(self, found, problem, inputs):
            if half == "forward":
                write(inputs, None, None)
            return found

        def change_backward(self, found, inputs, forward, dout):
            if half == "backward":
                write(inputs, forward, dout)
            return found

    assert kinds(dense(), Writes(), INPUTS_UNCHANGED) == {(name, "written")}


# ---------------------------------------------------------------- strides


def _as_if_contiguous(x):
    """The first elements of its memory, whatever its strides."""
    room = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
    flat = torch.as_strided(x, (min(room, x.numel()),), (1,))
    return flat.repeat(x.numel() // len(flat) + 1)[: x.numel()].view(x.shape).nan_to_num(1.0)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_an_input_that_is_read_as_contiguous_is_found(name):
    class Reads(Wrapped):
        def forward(self, problem, inputs):
            given = getattr(inputs, name)
            return super().forward(problem, replace(inputs, **{name: _as_if_contiguous(given)}))

    found = details(dense(), Reads(), STRIDES)
    for way in ("other_layout", "wide", "slices of one projection", "second_row"):
        assert any(f"contiguous copies, with {way}" in text for text in found), way


class ReadsDout(Wrapped):
    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        flat = _as_if_contiguous(dout)
        return super().backward(problem, inputs, forward, flat, dlse, wanted)


def test_dout_that_is_read_as_contiguous_is_found():
    found = details(dense(), ReadsDout(), STRIDES)
    for way in ("other_layout dout", "wide dout", "expanded_heads dout"):
        assert any(f"contiguous copies, with {way}" in text for text in found), way


@pytest.mark.parametrize("which", ["k, v", "dout"])
def test_expanded_heads_that_are_taken_for_more_are_found(which):
    class Expanded(Wrapped):
        def change_backward(self, found, inputs, forward, dout):
            tensor = dout if which == "dout" else inputs.k
            return replace(found, dv=found.dv * 2) if tensor.stride(-2) == 0 else found

    found = details(dense(), Expanded(), STRIDES)
    assert found
    assert all("expanded" in text and which.split(", ")[-1] in text for text in found)


def test_the_gradient_of_a_sum_over_tokens_and_heads_is_tried():
    class OneRow(Wrapped):
        def change_backward(self, found, inputs, forward, dout):
            return replace(found, dq=found.dq * 2) if not any(dout.stride()[:-1]) else found

    found = details(dense(), OneRow(), STRIDES)
    assert found
    assert all("one row expanded to all of dout" in text for text in found)


def test_views_that_raise_are_found_and_a_backend_without_dense_tensors_is_not_reached():
    class OnlyDense(Wrapped):
        def change_forward(self, found, problem, inputs):
            if not inputs.k.is_contiguous():
                raise ValueError("k must be contiguous")
            return found

    class Never(Wrapped):
        def change_forward(self, found, problem, inputs):
            raise ValueError("never")

    assert (None, "raised") in kinds(dense(), OnlyDense(), STRIDES)
    (answer,) = answers(dense(), Never(), STRIDES)
    assert "ValueError: never" in answer.reason
