"""The bounds of sliding windows."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from tests.reports.harness import BF16, drawn, mask_of, probe, report, same

from gradtruth import InvalidProblem

WINDOWS = "sliding-window bounds"


def inside(s: int, t: int, left: int, right: int, off: int = 0) -> torch.Tensor:
    i, j = torch.arange(s)[:, None] + off, torch.arange(t)
    seen = torch.ones(s, t, dtype=torch.bool)
    seen &= (j >= i - left) if left >= 0 else seen
    return seen & ((j <= i + right) if right >= 0 else seen)


@report(
    "huggingface/transformers#39408",
    WINDOWS,
    "a window of w tokens, (w - 1, 0), shows row i min(i + 1, w) keys",
)
def test_a_window_of_w_tokens_has_w_keys(own, dtype):
    """The left bound counts the tokens before the current one: passing w kept w + 1 of them."""
    call = probe(own, 12, 12, dtype=dtype, attn_mask_type="causal", window_size=(3, 0)).verify()
    seen = mask_of(call)
    assert seen.sum(1).tolist() == [min(i + 1, 4) for i in range(12)]
    assert torch.equal(seen, inside(12, 12, 3, 0))


@report(
    "NVIDIA/TransformerEngine#3528",
    WINDOWS,
    "-1 is unlimited: row 0 has out = v, no row is empty, lse is finite",
)
@pytest.mark.parametrize("window", [(-1, 0), (-1, -1), None], ids=str)
def test_minus_one_is_no_number(own, window):
    """The sentinel for an open window was used as a bound: every row was empty, out 0, lse -inf, and no error."""
    q, k, v, dout = drawn(own, 32, batch=2, dtype=BF16)
    call = own.attend(q, k, v, dout, attn_mask_type="causal", window_size=window).verify()
    same(call.out[:, 0], v[:, 0])
    assert call.lse.isfinite().all()
    assert (call.out != 0).any(-1).all()
    with pytest.raises(InvalidProblem, match="window_size"):
        own.attend(q, k, v, attn_mask_type="causal", window_size=(-2, 0))


@report(
    "NVIDIA/TransformerEngine#1197",
    WINDOWS,
    "i - left <= j <= i + right, inclusive, on every backend",
)
def test_every_bound_is_inclusive(own, dtype):
    """One backend drew the window's edge elsewhere than the two others."""
    for mask, window in product(("no_mask", "causal"), ((8, 0), (0, 0), (0, 3), (23, 24), (2, -1))):
        call = probe(own, 24, 24, dtype=dtype, attn_mask_type=mask, window_size=window)
        left, right = window[0], 0 if mask == "causal" else window[1]
        assert torch.equal(mask_of(call), inside(24, 24, left, right)), (mask, window)


@report("Dao-AILab/flash-attention#895", WINDOWS, "a bound past every key equals no bound")
@pytest.mark.parametrize("sizes", [(12, 5), (5, 12), (7, 7)], ids=str)
def test_a_huge_bound_is_no_bound(own, sizes):
    """An unlimited right bound became the number of keys, which hid keys from early rows where queries are more."""
    s, t = sizes
    for window in ((-1, 10**9), (10**9, 10**9), (2**31 - 1, -1), (-1, max(s, t))):
        call = probe(own, s, t, attn_mask_type="no_mask", window_size=window)
        assert mask_of(call).all(), window
    near = probe(own, s, t, attn_mask_type="no_mask", window_size=(-1, 2))
    assert torch.equal(mask_of(near), inside(s, t, -1, 2, t - s))
