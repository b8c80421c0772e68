"""autograd_contract, compile_equals_eager, launch_limits, large_offsets, graph_stream: health and planted faults."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.checks.small_cases import answers, dense, details, kinds, packed
from tests.mutants.wrap import Wrapped

from gradtruth import ops
from gradtruth.backends import get, select
from gradtruth.core.recent import Recent
from gradtruth.core.support import Reason, ReasonCode, Support
from gradtruth.verify.checks import compile_equals_eager, large_offsets, launch_limits, operator
from gradtruth.verify.checks.autograd_contract import AUTOGRAD_CONTRACT
from gradtruth.verify.checks.check import NotReached
from gradtruth.verify.checks.compile_equals_eager import COMPILE_EQUALS_EAGER
from gradtruth.verify.checks.graph_stream import GRAPH_STREAM
from gradtruth.verify.checks.large_offsets import LARGE_OFFSETS
from gradtruth.verify.checks.launch_limits import LAUNCH_LIMITS
from gradtruth.verify.engine import find, verify_case
from gradtruth.verify.findings import Kind, Verdict


@pytest.fixture
def by_name(monkeypatch):
    """Makes a backend the one that the library knows as "unfused"."""

    def put(backend):
        backend.name = "unfused"

        def known(name):
            return backend if name == "unfused" else get(name)

        monkeypatch.setattr(operator, "get", known)
        monkeypatch.setattr(select, "get", known)
        monkeypatch.setattr(ops, "_plans", Recent(16))
        select.select.cache_clear()
        return backend

    yield put
    select.select.cache_clear()


# ---------------------------------------------------------------- autograd_contract


@pytest.mark.parametrize("own", ["reference", "unfused"])
@pytest.mark.parametrize("make", [dense, packed, lambda: dense(lse_grad=True)])
def test_health_keeps_the_contract(own, make):
    assert answers(make(), get(own), AUTOGRAD_CONTRACT) == []


class ForgetsAlone(Wrapped):
    """dv is only right beside dk."""

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        found = super().backward(problem, inputs, forward, dout, dlse, wanted)
        return found if wanted.dk or not wanted.dv else replace(found, dv=found.dv * 2)


class LosesAlone(Wrapped):
    """dk does not come without dq."""

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        found = super().backward(problem, inputs, forward, dout, dlse, wanted)
        return found if wanted.dq else replace(found, dk=None)


def test_a_gradient_that_depends_on_others_is_found():
    assert kinds(dense(), ForgetsAlone(), AUTOGRAD_CONTRACT) == {("dv", "value")}
    found = details(dense(), ForgetsAlone(), AUTOGRAD_CONTRACT)
    assert [text.split("with only ")[1].split(" wanted")[0] for text in found] == ["dv", "dq, dv"]
    assert kinds(dense(), LosesAlone(), AUTOGRAD_CONTRACT) == {("dk", "form")}


class UsesUpItsForward(Wrapped):
    """The backward puts something else into the forward that it was given."""

    def change_backward(self, found, inputs, forward, dout):
        forward.lse.add_(0.5)
        return found


def test_a_backward_that_spoils_its_forward_is_found():
    assert ("dq", "value") in kinds(dense(), UsesUpItsForward(), AUTOGRAD_CONTRACT)


class AnotherForwardLater(Wrapped):
    """Right until a forward is computed again: forwards are the first run's, the graph's, and checkpointing's two."""

    def change_forward(self, found, problem, inputs):
        return replace(found, lse=found.lse + 0.5) if self.calls == 4 else found


def test_recomputation_is_seen_for_a_backend_with_a_name(by_name):
    assert kinds(dense(), AnotherForwardLater(), AUTOGRAD_CONTRACT) == set()
    found = details(dense(), by_name(AnotherForwardLater()), AUTOGRAD_CONTRACT)
    assert found
    assert all("recomputed (use_reentrant=False)" in text for text in found)


def test_a_second_derivative_that_comes_out_as_nothing_is_found(monkeypatch):
    silent = ops._AttentionBackward

    def remember(ctx, inputs, output):
        ctx.given = inputs

    def zeros(ctx, *grads):
        return tuple(
            torch.zeros_like(x) if isinstance(x, torch.Tensor) and x.is_floating_point() else None
            for x in ctx.given
        )

    monkeypatch.setattr(silent, "setup_context", staticmethod(remember))
    monkeypatch.setattr(silent, "backward", staticmethod(zeros))
    assert kinds(dense(), get("unfused"), AUTOGRAD_CONTRACT) == {(None, "law")}


# ---------------------------------------------------------------- compile_equals_eager


@pytest.mark.parametrize("make", [dense, packed])
def test_compiled_health_is_eager_health(make):
    assert answers(make(), get("unfused"), COMPILE_EQUALS_EAGER) == []


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_compiler_that_gets_one_half_wrong_is_found(monkeypatch, half):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    def right(graph, inputs):
        return make_boxed_func(graph)

    def wrong(graph, inputs):
        def run(*given):
            found = graph(*given)
            return [
                x * 2
                if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dim() == 4
                else x
                for x in found
            ]

        return make_boxed_func(run)

    halves = {"forward": (wrong, right), "backward": (right, wrong)}[half]
    compiler = aot_autograd(fw_compiler=halves[0], bw_compiler=halves[1])
    monkeypatch.setattr(compile_equals_eager, "_COMPILER", compiler)
    found = find(dense(), get("unfused"), COMPILE_EQUALS_EAGER)
    tensor = {"forward": "out", "backward": "dk"}[half]
    assert {(answer.tensor, str(answer.kind)) for answer in found} >= {
        (tensor, "value"),
        (tensor, "bits"),
    }
    assert "the eager call of one query less" in found[0].detail[0]


def test_what_does_not_compile_is_found(monkeypatch):
    def raises(graph, inputs):
        raise ValueError("no lowering")

    monkeypatch.setattr(compile_equals_eager, "_COMPILER", raises)
    assert kinds(dense(), get("unfused"), COMPILE_EQUALS_EAGER) == {(None, "raised")}


def test_an_object_without_a_name_in_the_library_is_not_compiled():
    assert answers(dense(), Wrapped(), COMPILE_EQUALS_EAGER) == [
        NotReached("it is no backend of this library by name")
    ]


# ---------------------------------------------------------------- launch_limits


@pytest.mark.parametrize("own", ["reference", "sdpa_math"])
def test_health_has_no_launch_limit(own):
    (answer,) = answers(dense(), Wrapped(own), LAUNCH_LIMITS)
    assert (answer.kind, answer.detail) == (None, ("1 sequences of 65,537 heads",))


LIMITS = {
    "out": lambda f, g: f is not None and f.out[:, :, 65_535:].zero_(),
    "dv": lambda f, g: g is not None and g.dv[:, :, 65_535:].copy_(g.dv[:, :, :2]),
    "dq": lambda f, g: g is not None and g.dq[:, :, -1].fill_(torch.nan),
    "dk": lambda f, g: g is not None and g.dk[:, :, -1].fill_(7.0),
}


@pytest.mark.parametrize("name", LIMITS)
def test_heads_past_the_limit_that_hold_garbage_are_found(name):
    class Past(Wrapped):
        def change_forward(self, found, problem, inputs):
            LIMITS[name](found, None)
            return found

        def change_backward(self, found, inputs, forward, dout):
            LIMITS[name](None, found)
            return found

    assert (name, "value") in kinds(dense(), Past(), LAUNCH_LIMITS)


def test_a_backend_that_refuses_or_raises_says_so(monkeypatch):
    class Raises(Wrapped):
        def change_forward(self, found, problem, inputs):
            raise ValueError("too many heads")

    (answer,) = answers(dense(), Raises(), LAUNCH_LIMITS)
    assert isinstance(answer, NotReached)
    assert "too many heads" in answer.reason
    monkeypatch.setattr(launch_limits.Subject, "supports", lambda self, case: "at most 128 heads")
    (answer,) = answers(dense(), Wrapped(), LAUNCH_LIMITS)
    assert answer == NotReached("1 sequences of 65,537 heads: at most 128 heads")


@pytest.mark.parametrize(
    "takes", [lambda problem: problem.spec.right == 0, lambda problem: problem.seqlen_kv > 1]
)
@pytest.mark.parametrize("faulty", [False, True])
def test_launch_limits_reach_who_takes_only_causal_masks_or_more_than_one_key(takes, faulty):
    class Few(Wrapped):
        def supports(self, problem, device):
            refused = Support((Reason(ReasonCode.MASK, "not this one"),))
            return super().supports(problem, device) if takes(problem) else refused

        def backward(self, *arguments):
            grads = super().backward(*arguments)
            if faulty:
                grads.dv[:, -1, -1] = 0
            return grads

    (answer,) = answers(dense(), Few(), LAUNCH_LIMITS)
    assert (answer.tensor, answer.kind) == (("dv", Kind.VALUE) if faulty else (None, None))


# ---------------------------------------------------------------- large_offsets


@pytest.fixture
def small_offsets(monkeypatch):
    """The check on the CPU, with rows a thousand elements apart."""
    monkeypatch.setattr(large_offsets, "_STRIDE", 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 40, 1 << 40))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)


class ShortOffsets(Wrapped):
    """Offsets of k past 150,000 elements wrap."""

    limit = 150_000

    def forward(self, problem, inputs):
        return super().forward(problem, self.wrapped(inputs))

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        return super().backward(problem, self.wrapped(inputs), forward, dout, dlse, wanted)

    def wrapped(self, inputs):
        rows, stride = inputs.k.shape[1], inputs.k.stride(1)
        at = torch.arange(rows) % max(1, min(rows, self.limit // stride))
        return replace(inputs, k=inputs.k[:, at.to(inputs.k.device)])


def test_rows_that_lie_far_apart_are_found_where_they_are(small_offsets):
    case = dense()
    assert answers(case, Wrapped(), LARGE_OFFSETS) == []
    found = details(case, ShortOffsets(), LARGE_OFFSETS)
    assert found
    assert all("with k apart" in text for text in found)


def test_large_offsets_need_memory_and_a_backend_that_takes_them(monkeypatch, small_offsets):
    class Raises(Wrapped):
        def change_forward(self, found, problem, inputs):
            if inputs.v.stride(1) == 1000:
                raise ValueError("illegal access")
            return found

    found = details(dense(), Raises(), LARGE_OFFSETS)
    assert found == ["v apart: ValueError: illegal access"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 40))
    assert answers(dense(), Wrapped(), LARGE_OFFSETS) == [
        NotReached("less than 12 GiB of the device are free")
    ]


# ---------------------------------------------------------------- what only a GPU has


@pytest.mark.parametrize("check", [GRAPH_STREAM, LARGE_OFFSETS])
def test_a_check_of_a_gpu_is_not_reached_on_the_cpu(check):
    rows = [
        row
        for row in verify_case(dense(), [get("unfused")], name="case", checks=[check])
        if not isinstance(row, str)
    ]
    assert [(row.verdict, row.detail) for row in rows] == [
        (Verdict.NOT_REACHED, ("it needs a cuda device, the case is on cpu",))
    ]
