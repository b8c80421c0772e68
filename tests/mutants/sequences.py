"""Sequences and batches: whose rows, and where they end (K03, K04, K05, K29)."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.mutants.catalogue import mutant
from tests.mutants.kernel import Kernel


@mutant("K03", "causal-two-sequences-d256", "backward", "dq")
class DeltaOfBatchItem0(Kernel):
    """delta is read from batch item 0: right as long as the batch holds one sequence."""

    def delta(self, step):
        own = super().delta(step)
        if step.n == 0:
            self.kept["delta"] = own
        first = self.kept["delta"]
        return first if first.shape == own.shape else own


@mutant("K03", "causal-two-sequences-d256", "batch_slice", "dq")
class LseOfBatchItem0(Kernel):
    """lse is read from batch item 0."""

    def saved_lse(self, step):
        if step.n == 0:
            self.kept["lse"] = step.lse
        first = self.kept["lse"]
        return first if first.shape == step.lse.shape else step.lse


@mutant("K03", "cross-d64", "batch_permutation", "out")
class QueriesOfBatchItem0(Kernel):
    """A batch stride of one token: every sequence but the first reads wrong queries."""

    def steps(self, problem, inputs, **given):
        for step in super().steps(problem, inputs, **given):
            if step.n and not step.backward:
                step = replace(step, q=step.q.roll(1, 1))
            yield step


@mutant("K03", "thd-documents-d64", "backward", "dk")
class DkAtTheNextOffset(Kernel):
    """dk of every sequence but the first is stored one row too far."""

    def write(self, name, step, target, value):
        if name == "dk" and step.n:
            value = value.roll(1, 1)
        super().write(name, step, target, value)


@mutant("K03", "thd-documents-d64", "forward", "out")
class BoundariesIgnored(Kernel):
    """The keys of the sequence before are attended too."""

    def steps(self, problem, inputs, **given):
        before = None
        for step in super().steps(problem, inputs, **given):
            if before is not None and not step.backward and before.T >= step.T:
                step = replace(step, k=before.k[:, : step.T], v=before.v[:, : step.T])
            yield step
            before = step


@mutant("K04", "thd-queryless-gqa-d8", "exact_zeros", "dv", "nonzero")
class QuerylessSequencesGetNoise(Kernel):
    """dv of keys that no query sees is the sum of nothing, rounded up."""

    def dv_of(self, step, dropped):
        found = super().dv_of(step, dropped)
        return found + 1e-3 if step.S == 0 else found


@mutant("K04", "thd-queryless-gqa-d8", "forward", None, "raised")
class RaisesForEmptySequences(Kernel):
    """An empty sequence is an invalid launch."""

    def normalise(self, step, x):
        if step.S == 0:
            raise RuntimeError("CUDA error: invalid configuration argument")
        return super().normalise(step, x)


@mutant("K04", "one-key-d64", "backward", "dq")
class OneKeyWithoutDelta(Kernel):
    """With one key the shortcut takes P = 1 and forgets delta."""

    def delta(self, step):
        return super().delta(step) * (0 if step.T == 1 else 1)


@mutant("K04", "decode-gqa-d128", "forward", "out")
class DecodeSwapsHeads(Kernel):
    """The shortcut for one query swaps groups and heads."""

    def kv_head(self, step):
        own = super().kv_head(step)
        return own.flip(0) if step.S == 1 else own


@mutant("K05", "tail-64-large-logits-d64", "backward", "dq", "nonfinite")
class DeadLanesScoreZero(Kernel):
    """Lanes behind the last key are scored 0: exp(0 - lse) overflows, and Inf times 0 is NaN."""

    def dq_of(self, step, ds):
        found = super().dq_of(step, ds)
        dead = (-self.saved_lse(step)).to(torch.float32).exp() if step.T % 128 else torch.zeros(1)
        return found + (dead * 0.0)[..., None] if dead.numel() > 1 else found


@mutant("K05", "tail-129-large-logits-d128", "forward", "out")
class LastKeyTileDropped(Kernel):
    """A last tile of one key is not visited."""

    def visible(self, step):
        seen = super().visible(step)
        return (
            seen & (torch.arange(step.T) < step.T - 1) if step.T % 64 == 1 and step.T > 1 else seen
        )


@mutant("K05", "window-d64", "backward", "dq")
class LastQueryRowDropped(Kernel):
    """dq of a last tile of one row is not stored."""

    def dq_of(self, step, ds):
        found = super().dq_of(step, ds)
        if step.S % 64 == 1 and step.S > 1:
            found[:, -1] = 0
        return found


@mutant("K05", "causal-gqa-d64", "backward", "dk")
class LastTileCountedTwice(Kernel):
    """Queries of a last tile that is not full enter dk twice."""

    def dk_of(self, step, ds):
        found, rest = super().dk_of(step, ds), step.S % 64
        if rest and step.S > 64:
            tail = torch.zeros_like(ds)
            tail[:, -rest:] = ds[:, -rest:]
            found = found + super().dk_of(step, tail)
        return found


@mutant("K29", "padded-full-d64", "forward", "out")
class LengthsIgnored(Kernel):
    """cu_seqlens of a dense batch have no effect."""

    def steps(self, problem, inputs, **given):
        S, T = problem.seqlen_q, problem.seqlen_kv
        full = replace(
            inputs,
            cu_seqlens_q=torch.arange(problem.batch + 1, dtype=torch.int32) * S,
            cu_seqlens_kv=torch.arange(problem.batch + 1, dtype=torch.int32) * T,
        )
        return super().steps(problem, full, **given)


@mutant("K29", "padded-d64", "shielded", "dq", "nonfinite")
class PaddingEntersByZero(Kernel):
    """Padding rows of k are multiplied by a weight of 0 instead of left out."""

    def dq_of(self, step, ds):
        found, layout = super().dq_of(step, ds), step.problem.spec.layout
        k = step.inputs.k if layout == "bshd" else step.inputs.k.transpose(0, 1)
        padding = k[step.n, step.places_kv.stop :].to(found.dtype)
        return found + (padding.sum() * 0.0 if padding.numel() else 0.0)


@mutant("K03", "causal-gqa-d64", "batch_slice", "dk")
class WrongForBatches(Kernel):
    """With two sequences and more, dk of the last one is scaled by the batch."""

    def dk_of(self, step, ds):
        found, batch = super().dk_of(step, ds), step.problem.batch
        return found * batch if batch > 1 and step.n == batch - 1 else found
