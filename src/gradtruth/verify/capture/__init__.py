"""Capture: attention calls of a running program as case files.

    with gradtruth.capture("cases", layer="*.layers.3.*", step="0,100-:50") as captured:
        train()
    print(captured.summary())

Calls are seen by ``gradtruth.verify.interception``: our functions and module, SDPA, and what is loaded of
flash-attn, TransformerEngine, xformers and others. A case holds q, k, v and whatever else the call read, with
strides and shared storage, and the gradient that came for its output. It is written in the backward that
brings the gradient, whole or not at all, so a crash later takes nothing away.

``selection`` says which calls, ``budget`` how much disk, ``steps`` what a step is, ``folder`` where files go,
``tally`` what was left out and why.
"""

from __future__ import annotations

from gradtruth.verify.capture.capture import Capture, capture

__all__ = ["Capture", "capture"]
