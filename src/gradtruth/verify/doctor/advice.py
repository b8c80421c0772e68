"""Advice: one line for each finding, on what it means and what to do now."""

from __future__ import annotations

from gradtruth.verify.findings import Kind, Row

__all__ = ["advice"]

_BY_CHECK = {
    "forward": "outputs are wrong: do not use it for this problem",
    "backward": "gradients are wrong: do not train with it for this problem",
    "backward-from-oracle": "its backward itself is wrong: do not train with it, nor build a ring on it",
    "batch_slice": "what else is in the batch changes the result: batch size 1 may look fine",
    "batch_permutation": "the place in the batch changes the result: per-row statistics are mixed up",
    "head_slice": "other heads change the result: suspect head indexing or a store over the edge",
    "call_order": "earlier calls change the result: suspect a cache or a kept workspace",
    "poisoned_memory": "what freed memory holds changes the result: suspect scratch that is read before it is written",
    "allocator_churn": "memory reuse changes the result; empty_cache may hide it, and does not mend it",
    "outside_unchanged": "it writes outside its tensors: expect corruption anywhere",
    "exact_zeros": "what nothing contributes to is not 0: padding gradients leak into weights",
    "shielded": "padding or a foreign sequence reaches valid results: keep it finite, better zero",
    "determinism": "runs differ: ask for its deterministic mode, or do not compare runs bit by bit",
    "strides": "views give other results than copies: pass contiguous tensors to it",
    "inputs_unchanged": "it writes its inputs: pass clones",
    "gqa_expand": "grouped heads differ from repeated ones: repeat k and v yourself",
    "tile_merge": "parts do not add up to the whole: no ring, no split over keys with it",
    "mask_equivalents": "the same mask said in two ways gives two results: use the form that is right above",
    "shift_invariance": "large logits change the result: keep scores small, or leave it",
    "dropout_consistency": "forward and backward do not drop the same weights: no dropout with it",
    "lse_contract": "lse is not what it says: do not merge or distil with it",
    "conservation": "gradients contradict each other: one of dq, dk and dv is wrong",
    "autograd_contract": "gradients depend on which inputs need them: ask for all, or freeze none",
    "compile_equals_eager": "compiled and eager differ: run it outside torch.compile",
    "graph_stream": "graphs, streams or the current device change the result: stay eager, on the default stream",
    "large_offsets": "offsets overflow 32 bits: keep every tensor under 2^31 elements",
    "launch_limits": "large batches or head counts fail: split the call",
}
_BY_KIND = {
    Kind.RAISED: "it says that it can, then raises: catch nothing, name another backend",
    Kind.NONFINITE: "NaN or Inf on finite input: training will diverge at once",
}


def advice(row: Row) -> str:
    """The line for a row with a finding."""
    if (
        row.kind is not None
        and row.kind in _BY_KIND
        and row.check in ("forward", "backward", "backward-from-oracle")
    ):
        return _BY_KIND[row.kind]
    return _BY_CHECK.get(row.check, "do not use it for this problem")
