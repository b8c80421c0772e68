"""Where the errors of a tensor are: per (sequence, head) and position, in every layout."""

import math

import pytest
import torch

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.edits.layouts import as_dense, as_thd
from gradtruth.verify.error_map import error_map

B, S, T, H, G, D = 2, 5, 7, 4, 2, 8


def _case(spec=None, S=S, T=T, batch=B, **lengths):
    q, dout = torch.ones(batch, S, H, D), torch.ones(batch, S, H, D)
    k, v = torch.ones(batch, T, G, D), torch.ones(batch, T, G, D)
    return Case.of(spec or Spec(), Inputs(q=q, k=k, v=v, **lengths), dout)


def _padded():
    return _case(
        Spec(lengths="cu_seqlens"),
        cu_seqlens_q=torch.tensor([0, 5, 8], dtype=torch.int32),
        cu_seqlens_kv=torch.tensor([0, 7, 11], dtype=torch.int32),
    )


def _map(case, name, found, expected):
    return error_map(case.problem, case.inputs, name, found, expected)


@pytest.mark.parametrize("layout", ["bshd", "sbhd", "thd"])
def test_one_wrong_token_is_where_it_is(layout):
    case = _padded()
    case = as_thd(case) if layout == "thd" else as_dense(case, layout)
    for name, like, heads, lengths in (
        ("dq", case.inputs.q, H, (5, 3)),
        ("dk", case.inputs.k, G, (7, 4)),
    ):
        expected = torch.ones_like(like)
        found = expected.clone()
        at = {"bshd": (1, 2), "sbhd": (2, 1), "thd": (lengths[0] + 2,)}[layout]
        found[(*at, heads - 1)] += 1
        picture = _map(case, name, found, expected)
        assert picture.labels == tuple(f"n{n},h{h}" for n in range(2) for h in range(heads))
        assert [len(line) for line in picture.values] == [n for n in lengths for _ in range(heads)]
        wrong = [
            (line, column)
            for line, values in enumerate(picture.values)
            for column, value in enumerate(values)
            if value
        ]
        assert wrong == [(2 * heads - 1, 2)]
        assert picture.values[-1][2] == pytest.approx(1.0), "as large as the tensor"


def test_lse_has_its_own_form():
    case = _case()
    expected = torch.ones(B, H, S)
    found = expected.clone()
    found[1, 3, 4] = 3.0
    picture = _map(case, "lse", found, expected)
    assert [line for line in picture.values if any(line)] == [(0.0, 0.0, 0.0, 0.0, 2.0)]
    assert picture.labels[picture.values.index((0.0, 0.0, 0.0, 0.0, 2.0))] == "n1,h3"


def test_equal_infinities_are_no_error_and_nan_is_an_infinite_one():
    case = _case()
    expected = torch.zeros(B, H, S)
    expected[0] = -math.inf
    found = expected.clone()
    found[1, 0, 2] = math.nan
    picture = _map(case, "lse", found, expected)
    assert picture.values[:H] == ((0.0,) * S,) * H
    assert picture.values[H] == (0.0, 0.0, math.inf, 0.0, 0.0)


def test_many_positions_share_columns_and_the_worst_rows_stay():
    case = _case(S=130, T=1, batch=20)
    expected = torch.ones(20, 130, H, D)
    found = expected.clone()
    found[19, 129, 3] += 8
    found[7, 0, 0] += 4
    picture = _map(case, "out", found, expected)
    assert (picture.step, len(picture.values[0]), picture.left_out) == (3, 44, 16)
    assert len(picture.labels) == 64
    last = picture.values[picture.labels.index("n19,h3")]
    assert last[-1] == pytest.approx(8.0)
    assert not any(last[:-1])
    # A third of a column is wrong: the root of the mean square.
    shared = picture.values[picture.labels.index("n7,h0")]
    assert shared[0] == pytest.approx(4 / math.sqrt(3))


def test_nothing_to_draw():
    case = _case()
    assert _map(case, "dsoftmax_offset", torch.ones(H), torch.ones(H)) is None
    empty = _case(batch=0)
    assert _map(empty, "dq", torch.ones(0, S, H, D), torch.ones(0, S, H, D)) is None
