"""Edits: the oracle of the edited case is the part of the oracle of the whole that the edit says it is."""

from dataclasses import replace
from functools import cache

import pytest
import torch

from gradtruth.core.layout import canonical, canonical_lse
from gradtruth.errors import InvalidProblem
from gradtruth.verify.doctor.programme import PROGRAMME, case_of
from gradtruth.verify.edits.arrangement import contiguous, is_contiguous, restrided, strided
from gradtruth.verify.edits.channels import channels
from gradtruth.verify.edits.crop import crop, crop_keys, crop_queries, lengths_of
from gradtruth.verify.edits.heads import (
    expand_groups,
    fold_groups,
    kv_heads,
    place_heads,
    query_heads,
)
from gradtruth.verify.edits.layouts import as_dense, as_thd, less_outside
from gradtruth.verify.edits.options import OPTIONS, options_of, without
from gradtruth.verify.edits.sequences import place_sequences, sequences
from gradtruth.verify.edits.values import (
    integers,
    patterned,
    quiet,
    round_values,
    simplicity,
    zeros,
)
from gradtruth.verify.suite.arrangement import ARRANGEMENTS, DOUT_ARRANGEMENTS
from gradtruth.verify.suite.suite import suite
from gradtruth.verify.trial import wanted_of
from gradtruth.verify.truth import oracle
from gradtruth.verify.truth.scoring import places

torch.set_num_threads(1)
PLACED = ("out", "lse", "dq", "dk", "dv")


def _small(recipe):
    p = recipe.problem
    size = p.num_heads * (p.seqlen_q + 1) * (p.seqlen_kv + 1) * max(p.batch, 1)
    return size < 60_000 and p.head_dim_qk <= 64


def _with_gaps_and_tail():
    recipe = next(item.recipe for item in PROGRAMME if item.name == "thd-gaps-gqa-d128")
    short = replace(recipe.problem, seqlen_q=30, seqlen_kv=40, head_dim_qk=8, head_dim_v=8)
    return replace(
        recipe,
        problem=short,
        places=((1, 9, 0, 9), (10, 0, 10, 6), (12, 11, 17, 13), (25, 1, 33, 4)),
    )


@cache
def cases():
    """Cases of the conformance suite, every kind of layout, lengths and option among them."""
    chosen = [r for r in suite().recipes if _small(r)][::2]
    found = [case_of(replace(r, wanted=r.wanted)) for r in chosen[:40]]
    found.append(case_of(_with_gaps_and_tail()))
    specs = [c.problem.spec for c in found]
    assert {(s.layout, s.lengths) for s in specs} >= {
        ("bshd", "full"), ("sbhd", "cu_seqlens"), ("bshd", "padding_mask"), ("thd", "cu_seqlens"),
    }  # fmt: skip
    assert {s.bias for s in specs} == {"none", "pre_scale", "post_scale"}
    assert any(0 < s.dropout_p < 1 for s in specs)
    return found


@cache
def truth(case):
    """All fp64 results by name."""
    forward, backward = oracle.evaluate(
        case.problem, case.inputs, case.dout, case.dlse, wanted_of(case)
    )
    return {**dict(forward.items()), **dict(backward.items())}


def same(found, expected, what):
    """Equal but for fp64 rounding; -inf equals -inf."""
    for name in expected:
        a, b = found[name].double(), expected[name].double()
        assert a.shape == b.shape, (what, name)
        assert torch.equal(a.isinf(), b.isinf()), (what, name)
        a, b = a.masked_fill(a.isinf(), 0), b.masked_fill(b.isinf(), 0)
        scale = float(b.abs().max()) if b.numel() else 0.0
        assert float((a - b).abs().max() if b.numel() else 0) <= 1e-9 * scale + 1e-12, (what, name)


def each(edit, least):
    """(case, edited case) for every case that the edit takes; at least so many."""
    count = 0
    for case in cases():
        try:
            part = edit(case)
        except InvalidProblem:
            continue
        assert part.history != case.history
        count += 1
        yield case, part
    assert count >= least, count


def rows(case, results):
    """out, lse, dq, dk, dv of every sequence without padding: [H, L, D] and [H, L] each."""
    found, layout = [], case.problem.layout
    for n, place in enumerate(places(case.problem, case.inputs)):
        at, own = 0 if layout == "thd" else n, {}
        for name in PLACED:
            span = place.keys if name in ("dk", "dv") else place.queries
            if name == "lse":
                own[name] = canonical_lse(results[name], layout)[at, :, span]
            else:
                own[name] = canonical(results[name], layout)[at, span].transpose(0, 1)
        found.append(own)
    return found


@pytest.mark.parametrize("keep_gaps", [False, True])
def test_sequences_in_any_order_and_repeated(keep_gaps):
    def order(case):
        B = case.problem.batch
        return list(reversed(range(B))) + [0] * (B > 0)

    for case, part in each(lambda c: sequences(c, order(c), keep_gaps=keep_gaps), 15):
        found, whole = rows(part, truth(part)), rows(case, truth(case))
        for n, own in zip(order(case), found, strict=True):
            same(own, whole[n], case.problem.label())
        into = {name: torch.zeros_like(truth(case)[name]) for name in PLACED}
        into["lse"].fill_(-torch.inf)
        place_sequences(case, order(case), truth(part), into, part if keep_gaps else None)
        same(into, {name: truth(case)[name] for name in PLACED}, case.problem.label())


def test_gaps_that_are_kept():
    kept = [
        part.inputs.cu_seqlens_kv_padded is not None
        for _, part in each(
            lambda c: sequences(c, list(range(c.problem.batch)), keep_gaps=True), 20
        )
        if part.problem.layout == "thd"
    ]
    assert any(kept)
    for case, part in each(
        lambda c: sequences(c, list(range(c.problem.batch)), keep_gaps=True), 14
    ):
        assert part.problem.seqlen_kv == case.problem.seqlen_kv
        if case.problem.layout == "thd":
            dropped = sequences(case, list(range(case.problem.batch)))
            assert dropped.inputs.cu_seqlens_kv_padded is None
            assert dropped.problem.seqlen_kv == sum(lengths_of(case)[1])


def test_the_first_sequences_keep_their_dropout():
    dropped = [c for c in cases() if 0 < c.problem.spec.dropout_p < 1 and c.problem.batch > 1]
    assert dropped
    for case in dropped:
        part = sequences(case, [0])
        same(rows(part, truth(part))[0], rows(case, truth(case))[0], case.problem.label())
        with pytest.raises(InvalidProblem, match="dropout_p is"):
            sequences(case, [1])


def test_kv_heads():
    for case, _ in each(lambda c: kv_heads(c, [c.problem.num_gqa_groups - 1]), 15):
        if 0 < case.problem.spec.dropout_p < 1:
            continue
        names = [n for n in (*PLACED, "max_logit", "dsoftmax_offset") if n in truth(case)]
        into = {name: torch.full_like(truth(case)[name], 7.0) for name in names}
        for g in range(case.problem.num_gqa_groups):
            place_heads(case, [g], truth(kv_heads(case, [g])), into)
        same(into, {name: truth(case)[name] for name in names}, case.problem.label())


def test_query_heads():
    """out, lse and dq of the heads that stay; dk and dv of single members add up to the group's."""
    for case, part in each(lambda c: query_heads(c, [c.problem.group_size - 1]), 15):
        share, G = case.problem.group_size, case.problem.num_gqa_groups
        heads = [g * share + share - 1 for g in range(G)]
        for own, whole in zip(rows(part, truth(part)), rows(case, truth(case)), strict=True):
            expected = {name: whole[name][heads] for name in ("out", "lse", "dq")}
            same(own, expected, case.problem.label())
        if share > 1:
            each_alone = [truth(query_heads(case, [r])) for r in range(share)]
            total = {name: sum(found[name] for found in each_alone) for name in ("dk", "dv")}
            same(total, {name: truth(case)[name] for name in total}, case.problem.label())


def test_groups_expanded():
    for case, part in each(expand_groups, 15):
        found = fold_groups(case, truth(part))
        same(found, truth(case), case.problem.label())
        assert part.problem.group_size == 1


def _exact(case, keep):
    """The queries that stay see what they saw; see the docstring of ``crop``."""
    spec = case.problem.spec
    fixed = {"top_left": "first", "bottom_right": "last"}[spec.alignment]
    return (spec.band.open and not spec.alibi) or keep == fixed


@pytest.mark.parametrize("keep", ["first", "last"])
def test_fewer_queries(keep):
    checked = 0
    for case, part in each(
        lambda c: crop_queries(c, max(1, max(lengths_of(c)[0], default=0) // 2), keep), 14
    ):
        if not _exact(case, keep) or case.inputs.padding_mask_q is not None:
            continue
        checked += 1
        old, new = lengths_of(case)[0], lengths_of(part)[0]
        for n, (own, whole) in enumerate(
            zip(rows(part, truth(part)), rows(case, truth(case)), strict=True)
        ):
            span = slice(0, new[n]) if keep == "first" else slice(old[n] - new[n], old[n])
            expected = {name: whole[name][:, span] for name in ("out", "lse", "dq")}
            same(own, expected, case.problem.label())
    assert checked >= 7


def test_both_halves_of_the_queries_add_up():
    checked = 0
    for case in cases():
        spec = case.problem.spec
        if not spec.band.open or spec.alibi or 0 < spec.dropout_p < 1 or spec.lengths == "full":
            continue
        old = lengths_of(case)[0]
        first = [length // 3 for length in old]
        try:
            parts = [
                truth(crop_queries(case, first, "first")),
                truth(crop_queries(case, [n - m for n, m in zip(old, first, strict=True)], "last")),
            ]
        except InvalidProblem:
            continue
        if case.inputs.padding_mask_q is not None:
            continue
        checked += 1
        total = {name: parts[0][name] + parts[1][name] for name in ("dk", "dv")}
        same(total, {name: truth(case)[name] for name in total}, case.problem.label())
    assert checked >= 2


def test_keys_that_nobody_sees():
    """The first keys under a top-left diagonal: the others are seen by no query."""
    checked = 0
    for case in cases():
        spec, (lq, lk) = case.problem.spec, lengths_of(case)
        if (
            spec.right != 0
            or spec.alignment != "top_left"
            or case.inputs.padding_mask_kv is not None
        ):
            continue
        shorter = [min(q, k) for q, k in zip(lq, lk, strict=True)]
        if spec.lengths == "full" and len(set(shorter)) > 1:
            continue
        part = crop_keys(case, shorter)
        checked += 1
        for own, whole, n in zip(
            rows(part, truth(part)), rows(case, truth(case)), shorter, strict=True
        ):
            expected = {name: whole[name] for name in ("out", "lse", "dq")}
            expected |= {name: whole[name][:, :n] for name in ("dk", "dv")}
            same(own, expected, case.problem.label())
    assert checked >= 2


def test_cropping_keeps_padding_gaps_and_room():
    for case, part in each(lambda c: crop(c, queries=1, keys=1, keep="last"), 16):
        old, new = case.problem, part.problem
        for side, before, after in (
            ("q", old.seqlen_q, new.seqlen_q),
            ("kv", old.seqlen_kv, new.seqlen_kv),
        ):
            lengths = [lengths_of(c)[0 if side == "q" else 1] for c in (case, part)]
            if getattr(case.inputs, f"padding_mask_{side}") is not None:
                continue
            count = sum if old.layout == "thd" else lambda found: max(found, default=0)
            assert before - count(lengths[0]) == after - count(lengths[1]), old.label()
            bounds = [getattr(problem, f"max_seqlen_{side}") for problem in (old, new)]
            if bounds[0] is not None:
                longest = [max(found, default=0) for found in lengths]
                assert bounds[0] - longest[0] == bounds[1] - longest[1], old.label()


def test_crop_refuses():
    case = next(c for c in cases() if c.problem.spec.lengths == "full" and c.problem.batch > 1
                and c.problem.seqlen_q > 3)  # fmt: skip
    with pytest.raises(InvalidProblem, match=r"queries is \[1, 2"):
        crop_queries(case, [1, 2] + [99] * (case.problem.batch - 1))
    uneven = [1, *[2] * (case.problem.batch - 1)]
    with pytest.raises(InvalidProblem, match="expected equal ones"):
        crop_queries(case, uneven)


def test_fewer_value_channels():
    for case, part in each(lambda c: channels(c, None, max(1, c.problem.head_dim_v // 2)), 15):
        Dv = part.problem.head_dim_v
        expected = {name: truth(case)[name][..., :Dv] for name in ("out", "dv")}
        same(truth(part), expected | {"lse": truth(case)["lse"]}, case.problem.label())


def test_fewer_key_channels_keep_the_scale():
    for case, part in each(lambda c: channels(c, max(1, c.problem.head_dim_qk // 2)), 15):
        assert part.problem.scale == case.problem.scale
        D = part.problem.head_dim_qk
        padded = {
            name: torch.cat([x[..., :D], torch.zeros_like(x[..., D:])], -1)
            for name, x in (("q", case.inputs.q), ("k", case.inputs.k))
        }
        whole = truth(replace_inputs(case, **padded))
        assert not whole["dq"][..., D:].any()
        expected = {name: whole[name][..., :D] for name in ("dq", "dk")}
        same(truth(part), expected | {"out": whole["out"]}, case.problem.label())


def replace_inputs(case, **tensors):
    from gradtruth.verify.edits.edited import edited

    return edited(case, tensors, "test")


@pytest.mark.parametrize("edit", [as_thd, as_dense, lambda c: as_dense(c, "sbhd", (2, 3))])
def test_another_layout(edit):
    for case, part in each(edit, 16):
        for own, whole in zip(rows(part, truth(part)), rows(case, truth(case)), strict=True):
            same(own, whole, case.problem.label())
        if part.problem.layout == "thd":
            assert part.problem.seqlen_q == sum(lengths_of(case)[0])


def test_dense_is_full_where_all_are_as_long():
    case = next(c for c in cases() if c.problem.spec.lengths == "full" and c.problem.batch > 1)
    assert as_dense(as_thd(case)).problem.spec.lengths == "full"
    assert as_dense(case, padding=(1, 0)).problem.spec.lengths == "cu_seqlens"
    with pytest.raises(InvalidProblem, match="padding is"):
        as_dense(case, padding=(-1, 0))


def test_less_outside():
    for case, part in each(lambda c: less_outside(c, 1), 10):
        for own, whole in zip(rows(part, truth(part)), rows(case, truth(case)), strict=True):
            same(own, whole, case.problem.label())
        old, new = case.problem, part.problem
        assert (new.seqlen_q, new.seqlen_kv) < (old.seqlen_q, old.seqlen_kv)
        if old.layout == "thd":
            assert new.seqlen_kv <= sum(lengths_of(case)[1]) + old.batch + 2
        with pytest.raises(InvalidProblem, match="no more outside"):
            less_outside(part, 1)


@pytest.mark.parametrize("option", ["tail", "gaps", "padding", "poison", "max_seqlen", "max_logit"])
def test_what_changes_no_number(option):
    for case, part in each(lambda c: without(c, option), 1):
        for own, whole in zip(rows(part, truth(part)), rows(case, truth(case)), strict=True):
            same(own, whole, (option, case.problem.label()))
        assert option not in options_of(part)


def test_options():
    reached = set()
    for case in cases():
        for option in options_of(case):
            part = without(case, option)
            assert option not in options_of(part), (option, case.problem.label())
            reached.add(option)
    assert reached >= set(OPTIONS) - {"tf32", "batch_invariant"}
    plain = next(c for c in cases() if c.inputs.bias is None)
    with pytest.raises(InvalidProblem, match="option is 'bias'"):
        without(plain, "bias")
    with pytest.raises(InvalidProblem, match="expected one of dropout"):
        without(plain, "nothing")


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_arrangements_keep_values(name):
    for case, part in each(lambda c: strided(c, name), 5):
        if name == "offset" and case.inputs.q.numel():
            assert not part.problem.stride_class("q").aligned
        if name != "expanded_heads":
            assert _equal(part, case)
        back = contiguous(part)
        assert is_contiguous(back)
        assert _equal(back, part)


def _equal(a, b):
    return all(
        torch.equal(x.nan_to_num(nan=1e4), b.tensors()[name].nan_to_num(nan=1e4))
        for name, x in a.tensors().items()
    )


@pytest.mark.parametrize("name", [n for n in DOUT_ARRANGEMENTS if n != "expanded_all"])
def test_an_edit_can_keep_the_strides(name):
    """Fewer heads and tokens with the same order of dims, alignment and expanded dims."""
    case = next(
        c
        for c in cases()
        if c.problem.spec.lengths == "full"
        and min(c.problem.seqlen_q, c.problem.seqlen_kv) > 3
        and c.problem.num_gqa_groups > 1
        and not c.problem.spec.dropout_p
    )
    given = strided(case, name if name != "expanded_heads" else "contiguous", name)
    part = crop(kv_heads(given, [1]), queries=3, keys=3)
    kept = restrided(part, given)
    assert _equal(kept, part)
    assert kept.history == part.history
    for tensor in ("q", "k", "v"):
        assert kept.problem.stride_class(tensor) == given.problem.stride_class(tensor), tensor
    if name == "expanded_heads":
        assert kept.dout.stride(-2) == 0 or kept.problem.num_heads == 1
    elif name != "contiguous":
        assert not is_contiguous(kept)


def test_values():
    case = case_of(next(item.recipe for item in PROGRAMME if item.name == "cross-d64"))
    assert simplicity(case.inputs.q) == 5
    for edit, rank in (
        (lambda c: zeros(c, ["q"]), 0),
        (lambda c: patterned(c, ["q"]), 2),
        (lambda c: integers(c, ["q"]), 2),
        (lambda c: integers(replace_inputs(c, q=c.inputs.q * 100), ["q"], 1000), 3),
        (lambda c: round_values(c, 2, ["q"]), 4),
    ):
        part = edit(case)
        assert simplicity(part.inputs.q) == rank
        assert torch.equal(part.inputs.k, case.inputs.k)
    near = round_values(case, 3, ["q"]).inputs.q.double()
    q = case.inputs.q.double()
    assert bool(((near - q).abs() <= q.abs() / 8).all())
    with pytest.raises(InvalidProblem, match="names is"):
        zeros(case, ["cu_seqlens_q"])
    with pytest.raises(InvalidProblem, match="bits is 0"):
        round_values(case, 0)
    with pytest.raises(InvalidProblem, match="has 0 outside"):
        quiet(case)
