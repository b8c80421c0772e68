"""watch: conservation laws and exact probes on the attention of a model that trains (docs/watch.md).

with gradtruth.watch(model, every=100) as watched:
    train()
print(watched.summary())
"""

from __future__ import annotations

from gradtruth.verify.watch.finding import Finding, WrongAttention, WrongAttentionWarning
from gradtruth.verify.watch.sentinel import Watch, watch

__all__ = ["Finding", "Watch", "WrongAttention", "WrongAttentionWarning", "watch"]
