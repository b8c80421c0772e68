"""A deal: calls in order, each as soon as it may begin."""

import threading

import pytest

from gradtruth.verify.doctor.deal import Deal


def test_one_that_may_not_begin_lets_the_next_pass():
    order = []
    with Deal(1) as deal:
        first = deal.add(lambda: order.append("waits"), lambda: "ready" in order)
        deal.add(lambda: order.append("ready"))
    assert order == ["ready", "waits"]
    assert first.result() is None


def test_what_a_call_raises_is_raised_where_it_is_asked_for_and_the_thread_goes_on():
    with Deal(1) as deal:
        bad, good = deal.add(lambda: {}["missing"]), deal.add(lambda: 3)
    assert good.result() == 3
    with pytest.raises(KeyError):
        bad.result()


def test_what_has_not_begun_never_begins_after_a_close():
    begun, go = threading.Event(), threading.Event()
    with Deal(1) as deal:
        running = deal.add(lambda: (begun.set(), go.wait(10)))
        waiting = deal.add(lambda: 1)
        assert begun.wait(10)
        deal.close(cancel=True)
        assert waiting.cancelled()
        go.set()
    assert running.result() == (None, True)
