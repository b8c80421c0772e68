"""The table of entry points. An inner one is listed after those that call it; the outer one is what is told."""

from __future__ import annotations

from gradtruth.verify.interception.entry import Entry
from gradtruth.verify.interception.flash_attn import FLASH
from gradtruth.verify.interception.own import OWN, function
from gradtruth.verify.interception.token_functions import FLA, VARLEN
from gradtruth.verify.interception.torch_sdpa import FLEX, SDPA
from gradtruth.verify.interception.transformer_engine import TRANSFORMER_ENGINE
from gradtruth.verify.interception.transformers_eager import EAGER, REGISTERED
from gradtruth.verify.interception.xformers import XFORMERS

__all__ = ["ENTRIES", "entry_of"]

ENTRIES: tuple[Entry, ...] = (
    REGISTERED,
    EAGER,
    TRANSFORMER_ENGINE,
    OWN,
    XFORMERS,
    *FLASH,
    FLA,
    VARLEN,
    FLEX,
    SDPA,
)


def entry_of(text: str) -> Entry:
    """The entry point of a function of the user's, "module:function", in the words of ``gradtruth.attention``."""
    return function(text)
