"""TransformerEngine itself: whether it is there, and what its own selection says about a problem."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

from gradtruth.backends.peers.bands import is_full
from gradtruth.backends.peers.installed import importable, library_on_cuda
from gradtruth.backends.peers.te_terms import terms_of
from gradtruth.core.problem import Problem
from gradtruth.core.support import Reason, ReasonCode

__all__ = ["FUSED", "MODULE", "library_reasons", "ragged_statistics", "selection_reasons"]

PROJECT = "transformer_engine"
MODULE = "transformer_engine.pytorch"
FUSED = "transformer_engine.pytorch.cpp_extensions.fused_attn"
_SELECTION = "transformer_engine.pytorch.attention.dot_product_attention.utils"
_LOGGER = "DotProductAttention"
_Kernel = Literal["fused", "flash or fused"]


@dataclass(frozen=True, slots=True)
class _Selected:
    """What TransformerEngine's selection answered: what is available, and why the rest is not."""

    flash: bool
    fused: bool
    chosen: str
    words: tuple[str, ...]


def library_reasons(device_type: str, module: str, names: tuple[str, ...]) -> list[Reason]:
    """Reasons of a machine without a CUDA device or TransformerEngine. Imports it only where there is a device.

    Args:
        device_type: where the problem is.
        module: what is called.
        names: attributes that it must have.
    """
    found = library_on_cuda(device_type, (8, 0), module, PROJECT, names)
    return found or importable(_SELECTION, PROJECT)


def selection_reasons(problem: Problem, kernel: _Kernel) -> list[Reason]:
    """Why TransformerEngine itself would not run such a kernel, in its own words.

    Args:
        problem: one against whose metadata and machine nothing speaks.
        kernel: "fused" for cuDNN's; "flash or fused" where the selection may choose between them. Its unfused
            kernel is no answer: it rounds scores to half precision and hides with -10000.
    """
    selected = _select(problem)
    if kernel == "fused":
        able, what = selected.fused, "FusedAttention"
    else:
        able, what = selected.chosen in ("flash", "fused"), "FlashAttention and FusedAttention"
    if able:
        return []
    said = "; ".join(word for word in selected.words if any(w in word for w in what.split(" and ")))
    text = f"TransformerEngine's selection refuses {what}: {said or 'it gives no reason'}"
    return [Reason(ReasonCode.VERSION, text)]


@lru_cache(maxsize=1024)
def _select(problem: Problem) -> _Selected:
    """Ask TransformerEngine's get_attention_backend, and listen to what it logs."""
    utils = import_module(_SELECTION)
    given = _parameters(problem)
    known = {field.name for field in fields(utils.AttentionParams)}
    with _overheard(utils) as words:
        flash, _, fused, _, _, available = utils.get_attention_backend(
            utils.AttentionParams(**{name: given[name] for name in given if name in known})
        )
    chosen = "flash" if flash else "fused" if fused else "unfused"
    return _Selected(bool(available[0]), bool(available[1]), chosen, tuple(words))


def _parameters(problem: Problem) -> dict[str, Any]:
    """Fields of AttentionParams. What a release does not know yet it cannot do, and refuses elsewhere."""
    spec, terms = problem.spec, terms_of(problem)
    thd = problem.layout == "thd"
    longest = [
        places if bound is None or not thd else min(bound, places)
        for bound, places in (
            (problem.max_seqlen_q, problem.seqlen_q),
            (problem.max_seqlen_kv, problem.seqlen_kv),
        )
    ]
    slopes = [problem.batch, problem.num_heads] if problem.slopes_batched else [problem.num_heads]
    return {
        "qkv_dtype": problem.torch_dtype,
        "qkv_layout": terms.qkv_layout,
        "batch_size": problem.batch,
        "num_heads": problem.num_heads,
        "num_gqa_groups": problem.num_gqa_groups,
        "max_seqlen_q": longest[0],
        "max_seqlen_kv": longest[1],
        "num_tokens_q": problem.seqlen_q if thd else 0,
        "num_tokens_kv": problem.seqlen_kv if thd else 0,
        "head_dim_qk": problem.head_dim_qk,
        "head_dim_v": problem.head_dim_v,
        "attn_mask_type": terms.attn_mask_type,
        "window_size": terms.window_size,
        "bottom_right_diagonal": terms.bottom_right_diagonal,
        "softcap": spec.softcap or 0.0,
        "alibi_slopes_shape": slopes if spec.alibi else None,
        "core_attention_bias_type": terms.attn_bias_type,
        "core_attention_bias_shape": problem.bias_shape,
        "core_attention_bias_requires_grad": spec.bias != "none",
        "pad_between_seqs": thd and not is_full(problem),
        "attention_dropout": spec.dropout_p,
        "deterministic": terms.deterministic,
        "is_training": True,
        "softmax_type": spec.softmax,
        "return_max_logit": spec.max_logit,
        "softmax_scale": problem.scale,
    }


@contextmanager
def _overheard(utils: Any) -> Iterator[list[str]]:
    """What the selection logs, at its finest level; nothing of it is printed."""
    words: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if message.startswith("Disabling"):
                words.append(message)

    logger, settings = logging.getLogger(_LOGGER), getattr(utils, "AttentionLogging", None)
    saved = logger.handlers, logger.level, logger.propagate
    level = getattr(settings, "_log_level", None)
    logger.handlers, logger.propagate = [Listener()], False
    if level is not None:
        settings._log_level = logging.DEBUG  # its one switch besides environment variables
    try:
        yield words
    finally:
        logger.handlers, logger.propagate = saved[0], saved[2]
        logger.setLevel(saved[1])
        if level is not None:
            settings._log_level = level


def ragged_statistics() -> bool:
    """Whether cuDNN's thd statistics are [tokens, H, 1]: since 9.6, and not on compute capability 12.0."""
    import torch

    version = import_module("transformer_engine.pytorch.utils").get_cudnn_version()
    return tuple(version) >= (9, 6, 0) and torch.cuda.get_device_capability() != (12, 0)
