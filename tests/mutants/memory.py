"""Memory: what is not written, not cleared, kept, or not one's own (K01, K02, K22)."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.mutants.catalogue import mutant
from tests.mutants.kernel import Kernel


@mutant("K01", "thd-gaps-gqa-d128", "poisoned_memory", "dk", "bits")
class GradientsInEmptyMemory(Kernel):
    """Buffers made with empty_like, of which only the owned rows are written."""

    def fresh(self, like, name):
        return torch.empty_like(like, memory_format=torch.contiguous_format)


@mutant("K01", "thd-gaps-gqa-d128", "exact_zeros", "dv", "nonzero")
class TailOfDvHoldsFirstRow(Kernel):
    """Rows past the last sequence get a copy of the first row."""

    def finish(self, name, tensor, problem, inputs):
        if name == "dv":
            end = int(
                inputs.cu_seqlens_kv_padded[-1]
                if inputs.cu_seqlens_kv_padded is not None
                else inputs.cu_seqlens_kv[-1]
            )
            tensor[end:] = tensor[0]
        return tensor


@mutant("K01", "thd-gaps-gqa-d128", "exact_zeros", "dq", "nonzero")
class GapsOfDqAreNaN(Kernel):
    """Gap rows of dq stay what an earlier tensor, NaN, left there."""

    def fresh(self, like, name):
        return super().fresh(like, name).fill_(torch.nan if name == "dq" else 0)


@mutant("K02", "thd-queryless-gqa-d8", "call_order", "dk")
class WorkspaceOfQuerylessSequences(Kernel):
    """dk and dv of grouped heads are summed in a workspace that is not cleared for a sequence without queries."""

    def write(self, name, step, target, value):
        if name in ("dk", "dv") and step.group > 1:
            kept = self.kept.get((name, step.n))
            if step.S:
                self.kept[name, step.n] = value
            elif kept is not None and kept.shape[1] >= step.T:
                value = kept[:, : step.T]
        super().write(name, step, target, value)


@mutant("K02", "causal-gqa-d64", "determinism", "dq", "bits")
class AccumulatorNotCleared(Kernel):
    """The dq accumulator starts from what the call before left in it."""

    def finish(self, name, tensor, problem, inputs):
        if name != "dq":
            return tensor
        before = self.kept.get(tensor.shape)
        self.kept[tensor.shape] = tensor.clone()
        return tensor if before is None else tensor + before


@mutant("K02", "causal-gqa-d64", "call_order", "dq")
class DeltaOfTheLastCall(Kernel):
    """delta is kept by shape and is that of the first call."""

    def delta(self, step):
        return self.kept.setdefault((step.n, step.q.shape), super().delta(step))


@mutant("K02", "causal-gqa-d64", "call_order", "dq")
class LseOfTheLastForward(Kernel):
    """The backward reads the lse that the last forward of that shape left, not the one that it is given."""

    def lse_value(self, step, lse):
        self.kept[step.n, step.q.shape] = lse
        return lse

    def saved_lse(self, step):
        return self.kept.get((step.n, step.q.shape), step.lse)


@mutant("K02", "causal-gqa-d64", "call_order", "dv")
class WrongFromTheSecondCall(Kernel):
    """Right in a fresh process; the second call of any shape reads its dv from a buffer of the first."""

    def finish(self, name, tensor, problem, inputs):
        if name == "dv":
            return self.kept.setdefault(tensor.shape, tensor).clone()
        return tensor


@mutant("K02", "causal-gqa-d64", "poisoned_memory", "dq")
class ScratchReadBeforeItIsWritten(Kernel):
    """A scratch for dq is made with empty and added to."""

    def finish(self, name, tensor, problem, inputs):
        if name != "dq":
            return tensor
        scratch = torch.empty(tensor.numel(), dtype=torch.float32).view_as(tensor)
        return (tensor + scratch.nan_to_num(1.0, 1.0, 1.0).clamp(-1, 1) * 0.125).to(tensor.dtype)


@mutant("K02", "causal-gqa-d64", "inputs_unchanged", "q", "written")
class ScalesItsQueriesInPlace(Kernel):
    """q is multiplied by the scale where it lies."""

    def forward(self, problem, inputs):
        found = super().forward(problem, inputs)
        inputs.q.mul_(problem.scale)
        return found


@mutant("K02", "causal-gqa-d64", "inputs_unchanged", "dout", "written")
class WritesDout(Kernel):
    """dout is used as scratch."""

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        found = super().backward(problem, inputs, forward, dout, dlse, wanted)
        dout[..., 0] = 0
        return found


@mutant("K02", "causal-gqa-d64", "outside_unchanged", "k", "written")
class WritesBehindItsKeys(Kernel):
    """One element behind the end of k is written."""

    def forward(self, problem, inputs):
        k, found = inputs.k, super().forward(problem, inputs)
        end = (
            k.storage_offset()
            + sum((n - 1) * s for n, s in zip(k.shape, k.stride(), strict=True))
            + 1
        )
        if end < k.untyped_storage().nbytes() // k.element_size():
            torch.as_strided(k, (1,), (1,), end).fill_(3.0)
        return found


@mutant("K22", "causal-gqa-d64", "call_order", "out")
class PlanWithoutTheScale(Kernel):
    """Plans are kept by shape without the scale in the key."""

    def scale(self, step):
        return self.kept.setdefault(step.q.shape, super().scale(step))


@mutant("K22", "thd-documents-d64", "call_order", "out")
class LengthsOfTheFirstBatch(Kernel):
    """Where sequences lie is kept by the shape of the tensors."""

    def steps(self, problem, inputs, *, backward, given=None):
        key = (inputs.q.shape, inputs.k.shape)
        first = self.kept.setdefault(
            key, (inputs.cu_seqlens_q.clone(), inputs.cu_seqlens_kv.clone())
        )
        stale = replace(inputs, cu_seqlens_q=first[0], cu_seqlens_kv=first[1])
        return super().steps(problem, stale, backward=backward, given=given)


@mutant("K21", "causal-gqa-d64", "determinism", "dq", "bits")
class SumsInAnyOrder(Kernel):
    """dq is added up atomically, in another order every time."""

    def dq_of(self, step, ds):
        order = torch.randperm(step.T)
        k = step.k[self.kv_head(step)][:, order]
        total = torch.zeros(*ds.shape[:2], k.shape[-1])
        for part in range(0, step.T, 32):
            total += ds[..., order][..., part : part + 32] @ k[:, part : part + 32]
        return total * self.scale(step)


@mutant("K24", "causal-gqa-d64", "autograd_contract", "dk")
class DkOnlyRightBesideDq(Kernel):
    """The branch for calls that want no dq forgets the scale of dk."""

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        found = super().backward(problem, inputs, forward, dout, dlse, wanted)
        if not wanted.dq and found.dk is not None:
            found.dk.mul_(2)
        return found


@mutant("K17", "qkv-packed-views-d64", "strides", "dq")
class DoutReadAsContiguous(Kernel):
    """dout's strides are taken for those of out."""

    def backward(self, problem, inputs, forward, dout, dlse, wanted):
        if not dout.is_contiguous():
            flat = torch.as_strided(dout, (min(dout.numel(), _room(dout)),), (1,))
            dout = flat.repeat(dout.numel() // len(flat) + 1)[: dout.numel()].view(dout.shape)
        return super().backward(problem, inputs, forward, dout, dlse, wanted)


@mutant("K17", "qkv-packed-views-d64", "strides", "out")
class KeysReadAsContiguous(Kernel):
    """Slices of a packed projection are read as if they were dense."""

    def forward(self, problem, inputs):
        k = inputs.k
        if not k.is_contiguous():
            flat = torch.as_strided(k, (min(k.numel(), _room(k)),), (1,), k.storage_offset())
            k = flat.repeat(k.numel() // len(flat) + 1)[: k.numel()].view(k.shape)
        return super().forward(problem, replace(inputs, k=k))


def _room(tensor):
    """Elements from the tensor's first one to the end of its storage."""
    return tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
