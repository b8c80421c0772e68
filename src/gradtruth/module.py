"""DotProductAttention: attention as a module, with TransformerEngine's argument names, order and defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradtruth.arguments import BIAS_TYPES, SOFTMAX_TYPES, Options, TensorArguments
from gradtruth.calls import Backends, Policy, run_forward, settle
from gradtruth.core.mask import parse_mask_type
from gradtruth.core.spec import Packing
from gradtruth.errors import InvalidProblem

__all__ = ["DotProductAttention", "alibi_slopes_of"]

_PACKINGS: dict[tuple[str, int], Packing] = {
    ("qkv_layer", -3): "3hd",
    ("qkv_layer", -2): "h3d",
    ("kv_layer", -3): "2hd",
    ("kv_layer", -2): "h2d",
}


class DotProductAttention(torch.nn.Module):
    """Scaled dot product attention for training; drops in for TransformerEngine's module of the same name.

    The meaning of every value is that of ``gradtruth.attention``. An argument that is not honoured raises. What
    differs from TransformerEngine on purpose: lengths come from actual lengths in every path, left-padded masks
    are right, rows without a visible key are exactly 0, tensors may live on any device, fp32 and fp64 work.

    Args:
        num_attention_heads: query heads H, before tensor parallelism.
        kv_channels: head dim, or (head dim of query and key, head dim of value).
        num_gqa_groups: KV heads G before tensor parallelism; default H.
        attention_dropout: probability that a weight is dropped, in training mode.
        qkv_format: "sbhd", "bshd" or "thd"; can be overridden per call.
        attn_mask_type: see ``gradtruth.attention``; "causal,padding" and the like are understood; overridable.
        window_size: (left, right), -1 is unlimited; overridable.
        bottom_right_diagonal: diagonal of a window or ALiBi where the mask's name does not fix it; overridable.
        sequence_parallel: when False and an RNG tracker is given, dropout draws from the forked tracker.
        tp_size: tensor-parallel size; heads, groups and the sink are per rank.
        get_rng_state_tracker: returns a tracker with ``fork()``.
        tp_group: when given, tp_size is its size.
        layer_number: 1-based, for the caller's use.
        attention_type: "self" or "cross".
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: context parallelism, not available in this release.
        softmax_scale: default 1 / sqrt(head dim of query and key).
        softmax_type: "vanilla", "off-by-one" or "learnable" (adds the parameter ``softmax_offset``, fp32 [H]).
        return_max_logit: ``forward`` returns (out, max_logit) with max_logit fp32 [H].
        name: for the caller's use.
        softcap: bound of the scores.
        backend: "auto", a name, or (forward, backward).
        deterministic: False allows variants whose bits differ from run to run.
        batch_invariant: a sequence's bits must not depend on the rest of the batch.
        check_inputs: check the content of cu_seqlens; default on the CPU only.
    """

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        cp_group: Any = None,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
        softmax_scale: float | None = None,
        softmax_type: str = "vanilla",
        return_max_logit: bool = False,
        name: str | None = None,
        *,
        softcap: float | None = None,
        backend: Backends = "auto",
        deterministic: bool = True,
        batch_invariant: bool = False,
        check_inputs: bool | None = None,
    ) -> None:
        super().__init__()
        if attention_type not in ("self", "cross"):
            raise InvalidProblem(
                f"attention_type is {attention_type!r}, expected 'self' or 'cross'"
            )
        if softmax_type not in SOFTMAX_TYPES:
            known = ", ".join(map(repr, SOFTMAX_TYPES))
            raise InvalidProblem(f"softmax_type is {softmax_type!r}, expected one of {known}")
        if not isinstance(attention_dropout, int | float) or not 0.0 <= attention_dropout <= 1.0:
            raise InvalidProblem(
                f"attention_dropout is {attention_dropout!r}, expected a number in [0, 1]"
            )
        if qkv_format not in ("sbhd", "bshd", "thd"):
            raise InvalidProblem(
                f"qkv_format is {qkv_format!r}, expected one of 'sbhd', 'bshd', 'thd'"
            )
        parse_mask_type(attn_mask_type)
        self.num_attention_heads = num_attention_heads
        self.head_dim_qk, self.head_dim_v = _head_dims(kv_channels)
        self.num_gqa_groups = num_attention_heads if num_gqa_groups is None else num_gqa_groups
        self.tp_group = tp_group
        self.tp_size = tp_size if tp_group is None else torch.distributed.get_world_size(tp_group)
        _check_heads(num_attention_heads, self.num_gqa_groups, self.tp_size)
        self.attention_dropout = attention_dropout
        self.qkv_format = qkv_format
        self.attn_mask_type = attn_mask_type
        self.window_size = window_size
        self.bottom_right_diagonal = bottom_right_diagonal
        self.sequence_parallel = sequence_parallel
        self.get_rng_state_tracker = get_rng_state_tracker
        self.layer_number = 1 if layer_number is None else layer_number
        self.attention_type = attention_type
        self.softmax_scale = softmax_scale
        self.softmax_type = softmax_type
        self.return_max_logit = return_max_logit
        self.name = name
        self.softcap = softcap
        self.backend = backend
        self.deterministic = deterministic
        self.batch_invariant = batch_invariant
        self.check_inputs = check_inputs
        self.set_context_parallel_group(cp_group, cp_global_ranks, cp_stream, cp_comm_type)
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(
                torch.zeros(num_attention_heads // self.tp_size)
            )
        else:
            self.register_parameter("softmax_offset", None)

    def set_context_parallel_group(
        self,
        cp_group: Any,
        cp_global_ranks: Any = None,
        cp_stream: Any = None,
        cp_comm_type: str = "p2p",
    ) -> None:
        """Take the context-parallel group; a group is refused in this release.

        Raises:
            NotImplementedError: ``cp_group`` is not None.
        """
        if cp_group is not None:
            raise NotImplementedError(
                f"cp_group is {cp_group!r} (cp_comm_type {cp_comm_type!r}), expected None: context parallelism is not "
                "available in this release"
            )
        self.cp_group, self.cp_global_ranks = cp_group, cp_global_ranks
        self.cp_stream, self.cp_comm_type = cp_stream, cp_comm_type

    def forward(
        self,
        query_layer: Tensor | None = None,
        key_layer: Tensor | None = None,
        value_layer: Tensor | None = None,
        attention_mask: Tensor | tuple[Tensor, Tensor] | None = None,
        qkv_format: str | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_kv: Tensor | None = None,
        cu_seqlens_q_padded: Tensor | None = None,
        cu_seqlens_kv_padded: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_kv: int | None = None,
        attn_mask_type: str | None = None,
        window_size: tuple[int, int] | None = None,
        bottom_right_diagonal: bool | None = None,
        checkpoint_core_attention: bool = False,
        core_attention_bias_type: str = "no_bias",
        core_attention_bias: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        fast_zero_fill: bool = True,
        inference_params: Any = None,
        pad_between_seqs: bool | None = None,
        fp8_output: bool | None = False,
        bf16_backward: bool | None = False,
        num_splits: int | None = 1,
        score_mod: Any = None,
        score_mod_bprop: Any = None,
        score_mod_tensors: Mapping[str, Tensor] | None = None,
        score_mod_bprop_tensors: Mapping[str, Tensor] | None = None,
        qkv_layer: Tensor | None = None,
        kv_layer: Tensor | None = None,
        qkv_interleave_dim: int = -3,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute attention.

        Args:
            query_layer: [S, B, H, D] (sbhd), [B, S, H, D] (bshd) or [tokens, H, D] (thd).
            key_layer: the same with T places and G heads.
            value_layer: like key_layer, last dim Dv.
            attention_mask: bool, True = masked out. For padding masks without cu_seqlens [B, 1, 1, S], or a pair
                for query and key; for arbitrary masks [1|B, 1|H, 1|S, 1|T]. Accepted and not read with a mask
                type that does not read it, and beside cu_seqlens in thd.
            qkv_format, attn_mask_type, window_size, bottom_right_diagonal: override the constructor's.
            cu_seqlens_q, cu_seqlens_kv: int32 [B + 1], actual lengths cumulated.
            cu_seqlens_q_padded, cu_seqlens_kv_padded: int32 [B + 1], storage offsets for thd with gaps.
            max_seqlen_q, max_seqlen_kv: hints.
            checkpoint_core_attention: recompute the forward in the backward instead of keeping its results.
            core_attention_bias_type: "no_bias", "pre_scale_bias", "post_scale_bias" or "alibi".
            core_attention_bias: [1|B, 1|H, 1|S, 1|T].
            alibi_slopes: fp32 [H] or [B, H]; default: the ALiBi paper's.
            fast_zero_fill: without effect: padding is always exactly 0.
            pad_between_seqs: without effect: the offsets say where the sequences are.
            inference_params, fp8_output, bf16_backward, num_splits, score_mod and its companions: refused.
            qkv_layer: packed [..., 3, H, D] or [..., H, 3, D], instead of the three.
            kv_layer: packed [..., 2, G, D] or [..., G, 2, D], instead of key and value.
            qkv_interleave_dim: where the 3 or 2 stands, -3 or -2.

        Returns:
            [S, B, H * Dv], [B, S, H * Dv] or [tokens, H * Dv], and max_logit when the constructor asked for it.

        Raises:
            InvalidProblem: (a ValueError) the arguments contradict each other.
            NotImplementedError: an argument is not honoured, or no backend can.
        """
        _refuse(
            inference_params=inference_params,
            fp8_output=fp8_output or None,
            bf16_backward=bf16_backward or None,
            num_splits=None if num_splits == 1 else num_splits,
            score_mod=score_mod,
            score_mod_bprop=score_mod_bprop,
            score_mod_tensors=score_mod_tensors,
            score_mod_bprop_tensors=score_mod_bprop_tensors,
        )
        query, key, value, packing = _unpacked(
            query_layer, key_layer, value_layer, qkv_layer, kv_layer, qkv_interleave_dim
        )
        form = self.qkv_format if qkv_format is None else qkv_format
        mask_type = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        self._check_sizes(query, key, value, packing)
        bias_type, slopes = self._bias(
            core_attention_bias_type, core_attention_bias, alibi_slopes, query
        )
        tensors = TensorArguments(
            query=query,
            key=key,
            value=value,
            attention_mask=_read_mask(attention_mask, mask_type, form, cu_seqlens_q),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_kv=cu_seqlens_kv,
            cu_seqlens_q_padded=cu_seqlens_q_padded,
            cu_seqlens_kv_padded=cu_seqlens_kv_padded,
            bias=core_attention_bias,
            alibi_slopes=slopes,
            softmax_offset=self.softmax_offset,
            dropout_seed=self._dropout_seed(query),
        )
        options = Options(
            qkv_format=form,
            attn_mask_type=mask_type,
            window_size=self.window_size if window_size is None else window_size,
            bottom_right_diagonal=_first(bottom_right_diagonal, self.bottom_right_diagonal),
            max_seqlen_q=max_seqlen_q,
            max_seqlen_kv=max_seqlen_kv,
            softmax_scale=self.softmax_scale,
            softcap=self.softcap,
            bias_type=bias_type,
            softmax_type=self.softmax_type,
            dropout_p=self.attention_dropout if self.training else 0.0,
            deterministic=self.deterministic,
            batch_invariant=self.batch_invariant,
            max_logit=self.return_max_logit,
            packing=packing,
        )
        policy = Policy(self.backend, self.check_inputs)
        if checkpoint_core_attention:
            settled = settle(tensors, options, policy)
            # Nothing in it draws random numbers, and the generator's state cannot be read in a CUDA graph.
            again = checkpoint(
                run_forward, tensors, *settled, use_reentrant=False, preserve_rng_state=False
            )
            out, _, max_logit = cast("tuple[Tensor, Tensor, Tensor | None]", again)
        else:
            out, _, max_logit = run_forward(tensors, options, policy)
        merged = out.flatten(-2)
        return (merged, cast("Tensor", max_logit)) if self.return_max_logit else merged

    def _check_sizes(
        self, query: Tensor | None, key: Tensor | None, value: Tensor | None, packing: Packing
    ) -> None:
        """Head counts and dims against the constructor; what is not a 3-d or 4-d tensor is named later."""
        heads, groups = (
            self.num_attention_heads // self.tp_size,
            self.num_gqa_groups // self.tp_size,
        )
        expected = [("query_layer", query, heads, self.head_dim_qk)]
        if packing == "separate":
            expected += [
                ("key_layer", key, groups, self.head_dim_qk),
                ("value_layer", value, groups, self.head_dim_v),
            ]
        elif packing in ("3hd", "h3d"):
            dim = -2 if packing == "3hd" else -3
            if heads != groups or self.head_dim_qk != self.head_dim_v:
                raise InvalidProblem(
                    f"qkv_layer is given with {groups} groups for {heads} heads and head dims {self.head_dim_qk} and "
                    f"{self.head_dim_v}, expected them to be equal; pass kv_layer, or the three apart"
                )
            _expect("qkv_layer", query, dim, heads, self.head_dim_qk)
            return
        else:
            if self.head_dim_qk != self.head_dim_v:
                raise InvalidProblem(
                    f"kv_layer is given with head dims {self.head_dim_qk} and {self.head_dim_v}, expected "
                    "them to be equal"
                )
            _expect("kv_layer", key, -2 if packing == "2hd" else -3, groups, self.head_dim_qk)
        for name, tensor, count, head_dim in expected:
            _expect(name, tensor, -2, count, head_dim)

    def _bias(
        self, kind: str, bias: Tensor | None, slopes: Tensor | None, query: Tensor | None
    ) -> tuple[str, Tensor | None]:
        if kind not in ("no_bias", "alibi", *BIAS_TYPES):
            known = ", ".join(map(repr, ("no_bias", *BIAS_TYPES, "alibi")))
            raise InvalidProblem(f"core_attention_bias_type is {kind!r}, expected one of {known}")
        if (bias is not None) != (kind in BIAS_TYPES):
            state = "given" if bias is not None else "None"
            raise InvalidProblem(
                f"core_attention_bias is {state} with core_attention_bias_type {kind!r}, expected a bias with "
                "'pre_scale_bias' and 'post_scale_bias' only"
            )
        if kind != "alibi":
            if slopes is not None:
                raise InvalidProblem(
                    f"alibi_slopes is given with core_attention_bias_type {kind!r}, expected 'alibi'"
                )
            return kind if kind in BIAS_TYPES else "post_scale_bias", None
        if slopes is None and isinstance(query, Tensor):
            slopes = alibi_slopes_of(self.num_attention_heads // self.tp_size, query.device)
        return "post_scale_bias", slopes

    def _dropout_seed(self, query: Tensor | None) -> Tensor | None:
        """Drawn here so that the tracker's state is used, and outside what checkpointing runs twice."""
        if not (self.training and self.attention_dropout) or not isinstance(query, Tensor):
            return None
        scope: AbstractContextManager[Any] = nullcontext()
        if self.get_rng_state_tracker is not None and not self.sequence_parallel:
            scope = self.get_rng_state_tracker().fork()
        with scope:
            return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=query.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # TransformerEngine's checkpoints carry fp8 state here, which attention in these dtypes does not have.
        for key in [k for k in state_dict if k.startswith(prefix) and k.endswith("_extra_state")]:
            del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        """What differs from the defaults, beside heads and head dims."""
        shown = [f"heads={self.num_attention_heads}/{self.num_gqa_groups}"]
        dims = {self.head_dim_qk, self.head_dim_v}
        shown.append(
            f"head_dim={self.head_dim_qk if len(dims) == 1 else (self.head_dim_qk, self.head_dim_v)}"
        )
        shown += [f"qkv_format={self.qkv_format!r}", f"attn_mask_type={self.attn_mask_type!r}"]
        for name, default in (
            ("window_size", None),
            ("bottom_right_diagonal", None),
            ("attention_dropout", 0.0),
            ("softmax_scale", None),
            ("softcap", None),
            ("softmax_type", "vanilla"),
            ("backend", "auto"),
        ):
            value = getattr(self, name)
            if value != default:
                shown.append(f"{name}={value!r}")
        return ", ".join(shown)


def alibi_slopes_of(heads: int, device: torch.device | str | None = None) -> Tensor:
    """The ALiBi paper's slopes, fp32 [heads].

    2^(-8k/n) for n the largest power of two in heads, and for the rest every second one of 2n heads.

    Source: Press et al., arXiv 2108.12409, section 3, and its reference implementation for other head counts.
    """
    power = 2 ** (heads.bit_length() - 1)
    # Computed on the device: a copy from the host would wait for it, and fail in a CUDA graph.
    k = torch.arange(1, heads + 1, dtype=torch.float64, device=device)
    exponents = torch.where(k <= power, -8.0 * k / power, -4.0 * (2.0 * (k - power) - 1.0) / power)
    return torch.exp2(exponents).float()


def _head_dims(kv_channels: int | tuple[int, int]) -> tuple[int, int]:
    dims = kv_channels if isinstance(kv_channels, tuple | list) else (kv_channels, kv_channels)
    if len(dims) != 2 or any(type(dim) is not int or dim < 1 for dim in dims):
        raise InvalidProblem(
            f"kv_channels is {kv_channels!r}, expected a positive int or a pair of them"
        )
    return dims[0], dims[1]


def _check_heads(heads: int, groups: int, tp_size: int) -> None:
    for name, value in (
        ("num_attention_heads", heads),
        ("num_gqa_groups", groups),
        ("tp_size", tp_size),
    ):
        if type(value) is not int or value < 1:
            raise InvalidProblem(f"{name} is {value!r}, expected a positive int")
    if heads % groups:
        raise InvalidProblem(
            f"num_attention_heads is {heads}, expected a multiple of num_gqa_groups, {groups}"
        )
    if heads % tp_size or groups % tp_size:
        raise InvalidProblem(
            f"tp_size is {tp_size}, expected a divisor of {heads} heads and {groups} groups"
        )


def _refuse(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            raise NotImplementedError(
                f"{name} is {value!r}: not honoured by gradtruth; leave it at its default"
            )


def _first(given: bool | None, default: bool | None) -> bool | None:
    return default if given is None else given


def _unpacked(
    query: Tensor | None,
    key: Tensor | None,
    value: Tensor | None,
    qkv: Tensor | None,
    kv: Tensor | None,
    interleave_dim: int,
) -> tuple[Any, Any, Any, Packing]:
    """What to attend on: (query, key, value), (qkv, None, None) or (query, kv, None), and how it is packed."""
    if qkv is None and kv is None:
        return query, key, value, "separate"
    if qkv is not None and kv is not None:
        raise InvalidProblem("qkv_layer and kv_layer are both given, expected one of them")
    name, packed, others = (
        ("qkv_layer", qkv, (("query_layer", query), ("key_layer", key), ("value_layer", value)))
        if qkv is not None
        else ("kv_layer", kv, (("key_layer", key), ("value_layer", value)))
    )
    for other, tensor in others:
        if tensor is not None:
            raise InvalidProblem(f"{other} is given beside {name}, expected None")
    if name == "kv_layer" and query is None:
        raise InvalidProblem("query_layer is None beside kv_layer, expected the query")
    if (name, interleave_dim) not in _PACKINGS:
        raise InvalidProblem(f"qkv_interleave_dim is {interleave_dim!r}, expected -3 or -2")
    count = 3 if name == "qkv_layer" else 2
    if (
        not isinstance(packed, Tensor)
        or packed.dim() not in (4, 5)
        or packed.shape[interleave_dim] != count
    ):
        found = list(packed.shape) if isinstance(packed, Tensor) else type(packed).__name__
        raise InvalidProblem(
            f"{name} is {found}, expected 5 dims (4 for thd) with {count} in dim {interleave_dim}"
        )
    packing = _PACKINGS[name, interleave_dim]
    return (packed, None, None, packing) if qkv is not None else (query, packed, None, packing)


def _expect(name: str, tensor: Any, dim: int, heads: int, head_dim: int) -> None:
    if not isinstance(tensor, Tensor):
        raise InvalidProblem(f"{name} is {type(tensor).__name__}, expected a tensor")
    if tensor.dim() >= -dim and (tensor.shape[dim] != heads or tensor.shape[-1] != head_dim):
        raise InvalidProblem(
            f"{name} has {tensor.shape[dim]} heads of dim {tensor.shape[-1]}, expected {heads} of {head_dim} as the "
            "constructor says (per tensor-parallel rank)"
        )


def _read_mask(mask: Any, mask_type: str, qkv_format: str, cu_seqlens: Tensor | None) -> Any:
    """The mask if this mask type reads it. Callers such as Megatron pass one always."""
    kind = parse_mask_type(mask_type)
    reads = kind.arbitrary or (
        kind.padding and not (qkv_format == "thd" and cu_seqlens is not None)
    )
    return mask if reads else None
