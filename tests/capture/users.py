"""An attention of a user's."""

from __future__ import annotations

import torch


def attend(query, key, value, *, softmax_scale):
    """[B, S, H, D], plain."""
    scores = torch.einsum("bshd,bthd->bhst", query, key) * softmax_scale
    return torch.einsum("bhst,bthd->bshd", scores.softmax(-1), value)
