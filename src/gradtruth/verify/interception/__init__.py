"""Interception: every attention call of a running program, seen from outside.

    def on_call(call: Call) -> Listener | Answer | None: ...

    with intercept(on_call, root=model, on_unseen=print):
        train()

``intercept`` replaces the entry points of ``table.ENTRIES`` (``F.scaled_dot_product_attention``, flash-attn's
functions, TransformerEngine's module, transformers' eager attention, our own) wherever they are referenced, and
undoes it at the end. For every call made while it is switched on, ``on_call`` gets a ``Call``: which entry point, in
which layer, the ``Problem`` and ``Inputs`` that it means (views of the caller's memory, strides kept). Whoever
returns a ``Listener`` is told out and lse after the forward, and dout, dlse and the gradients of exactly this call
in the backward: operands go through an identity, so other users of the same q, k or v do not enter.

What cannot be said as a Problem is told to ``on_unseen`` once, with the reason. A call inside another one that was
told (flash-attn under TransformerEngine) is part of that, and told only after ``Answer.INSIDE``. Code compiled by
torch.compile is never seen: there the entry points are what they always were.
"""

from __future__ import annotations

from gradtruth.verify.interception.call import Answer, Call, Listener, Unseen
from gradtruth.verify.interception.intercept import Interception, intercept

__all__ = ["Answer", "Call", "Interception", "Listener", "Unseen", "intercept"]
