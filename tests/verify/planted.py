"""Faults for the minimiser to reduce: a healthy backend wrapped."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import torch

from gradtruth.backends import get
from gradtruth.core.extents import resolve
from gradtruth.core.layout import canonical


class Wrapped:
    """The reference under another name."""

    name = "planted"

    def __getattr__(self, name):
        return getattr(get("reference"), name)


class DeltaOfTheFirstItem(Wrapped):
    """dq is computed with delta of batch item 0, as soon as there are two: TransformerEngine#3216."""

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        healthy = get("reference")
        found = healthy.backward(problem, inputs, forward, dout, dlse, wanted)
        if problem.batch < 2 or problem.layout == "thd":
            return found
        out, upstream = (canonical(x, problem.layout).float() for x in (forward.out, dout))
        delta = (out * upstream).sum(-1).transpose(1, 2)  # [B, H, S]
        shift = delta - delta[:1]
        own = shift if dlse is None else shift + dlse
        wrong = healthy.backward(problem, inputs, forward, dout, own.contiguous(), wanted)
        return replace(found, dq=wrong.dq)


class KeptWorkspace(Wrapped):
    """dk and dv of grouped heads are summed in a workspace that lives on, and is not cleared for a sequence without

    queries: TransformerEngine#2448.
    """

    def __init__(self):
        self.workspace = {}

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        found = get("reference").backward(problem, inputs, forward, dout, dlse, wanted)
        if problem.layout != "thd" or problem.group_size == 1:
            return found
        where = resolve(problem, inputs)
        lengths = where.length_q.tolist()
        for name in ("dk", "dv"):
            grad = getattr(found, name)
            for n, (start, count) in enumerate(
                zip(where.start_kv.tolist(), where.length_kv.tolist(), strict=True)
            ):
                rows = grad[start : start + count]
                kept = self.workspace.get((name, n))
                if lengths[n]:
                    self.workspace[name, n] = rows.clone()
                elif kept is not None and len(kept) and kept.shape[1:] == rows.shape[1:]:
                    take = min(len(kept), count)
                    rows[:take] = kept[:take]
        return found


class Flaky(Wrapped):
    """Two calls in three have a dv that is twice as large."""

    def __init__(self):
        self.calls = 0

    def backward(self, *arguments):
        self.calls += 1
        found = get("reference").backward(*arguments)
        return found if self.calls % 3 == 0 else replace(found, dv=found.dv * 2)


class DoutAsContiguous(Wrapped):
    """A dout that is not contiguous is read as if it were."""

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        if not dout.is_contiguous():
            room = dout.untyped_storage().nbytes() // dout.element_size() - dout.storage_offset()
            flat = torch.as_strided(dout, (room,), (1,), dout.storage_offset()).nan_to_num(3.0)
            dout = flat.repeat(dout.numel() // room + 1)[: dout.numel()].view(dout.shape)
        return get("reference").backward(problem, inputs, forward, dout, dlse, wanted)


class Dies(Wrapped):
    """The process ends in the backward of more than four tokens, as after a fault that nobody catches."""

    def backward(self, problem, inputs, *rest):
        if problem.seqlen_q > 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return get("reference").backward(problem, inputs, *rest)


class Hangs(Wrapped):
    """The forward does not come back."""

    def forward(self, problem, inputs):
        time.sleep(3600)


DELTA = DeltaOfTheFirstItem()


STARTUP = 0.7  # seconds


def _filled(scratch):
    """Whether somebody has filled it with one byte."""
    held = scratch.contiguous().view(torch.uint8)
    return bool((held == held.flatten()[0]).all())


class StaleScratch(Wrapped):
    """dk and dv of a sequence without queries are what fresh memory held, and the library takes long to start.

    TransformerEngine#2448 as it is in a process of its own: there memory is 0, and everything is right.

    Args:
        starts: a file that gets the number of every process that has started the library.
    """

    def __init__(self, starts):
        self.starts = Path(starts)

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        started = self.starts.read_text().split() if self.starts.exists() else []
        if str(os.getpid()) not in started:
            time.sleep(STARTUP)
            self.starts.write_text(" ".join([*started, str(os.getpid())]))
        found = get("reference").backward(problem, inputs, forward, dout, dlse, wanted)
        if problem.layout != "thd" or problem.group_size == 1:
            return found
        where = resolve(problem, inputs)
        for name in ("dk", "dv"):
            grad = getattr(found, name)
            scratch = torch.empty_like(grad)
            if not _filled(scratch):
                scratch.zero_()  # as a fresh process has it on a GPU
            for queries, start, count in zip(
                where.length_q.tolist(),
                where.start_kv.tolist(),
                where.length_kv.tolist(),
                strict=True,
            ):
                if not queries:
                    grad[start : start + count] = scratch[start : start + count]
        return found


WORKSPACE = KeptWorkspace()
DOUT = DoutAsContiguous()
DIES = Dies()
HANGS = Hangs()
