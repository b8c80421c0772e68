"""Reasons and claims as data."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from gradtruth.core.support import DEFAULT_CLAIMS, Claims, Reason, ReasonCode, Support

NAMES = [f.name for f in fields(Claims)]


def test_support_is_the_absence_of_reasons():
    dtype = Reason(ReasonCode.DTYPE, "dtype is float64, the limit is float32")
    dims = Reason(ReasonCode.HEAD_DIM, "head_dim_qk is 320, the limit is 256")
    assert Support().ok
    assert not Support((dtype,)).ok
    assert Support((dtype, dims)).reasons == (dtype, dims)
    assert str(dims) == "head_dim_qk is 320, the limit is 256"
    assert ReasonCode("head_dim") is dims.code


def test_nothing_is_promised_unless_said():
    assert not any(getattr(Claims(), name) for name in NAMES)


def test_the_default_set_is_all_but_batch_invariance():
    assert [name for name in NAMES if not getattr(DEFAULT_CLAIMS, name)] == ["batch_invariant"]


@pytest.mark.parametrize("name", NAMES)
def test_missing_names_the_promise_that_is_not_made(name):
    one = Claims(**{name: True})
    every = Claims(**dict.fromkeys(NAMES, True))
    others = Claims(**{other: other != name for other in NAMES})
    assert Claims().missing(one) == (name,)
    assert others.missing(one) == (name,)
    assert one.missing(one) == every.missing(one) == one.missing(Claims()) == ()
    assert set(one.missing(every)) == set(NAMES) - {name}


@pytest.mark.parametrize("value", [Reason(ReasonCode.SIZE, "x"), Support(), Claims()], ids=repr)
def test_values_are_hashable_and_frozen(value):
    hash(value)
    with pytest.raises(FrozenInstanceError):
        setattr(value, fields(value)[0].name, None)
