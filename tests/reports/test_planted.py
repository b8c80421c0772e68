"""The reports' faults, planted: with the fault, the report's test fails."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.reports import faults as f
from tests.reports import (
    test_alignment,
    test_bias,
    test_context_parallel,
    test_dropout,
    test_empty,
    test_gqa,
    test_head_dims,
    test_ignored,
    test_large_logits,
    test_lse,
    test_masked_rows,
    test_memory,
    test_repeats,
    test_scores,
    test_sinks,
    test_strides,
    test_tails,
    test_varlen,
    test_windows,
)
from tests.reports.harness import FP32, Own

from gradtruth.backends.reference import Reference

OWN = Own("reference", torch.device("cpu"))

# public id: (half, fault or how to make one that remembers, the report's test)
PLANTED: dict[str, tuple[str, Callable[..., Any], Callable[[], None]]] = {
    "pytorch/pytorch#188933": ("backward", f.tail_rows("dk"),
        partial(test_memory.test_rows_past_the_last_sequence, OWN, FP32, 26, None)),
    "fla-org/flash-linear-attention#892": ("backward", f.tail_rows("dk"),
        partial(test_memory.test_tail_of_gradients_meets_a_projection, OWN, None)),
    "NVIDIA/TransformerEngine#2448": ("backward", f.Stale(), partial(test_memory.test_calls_in_any_order, OWN, "AB")),
    "Dao-AILab/flash-attention#2337": ("backward", f.last_rows_of_dq,
        partial(test_memory.test_many_short_sequences, OWN, None)),
    "NVIDIA/TransformerEngine#3333": ("backward", f.first_of_dq,
        partial(test_varlen.test_one_packed_sequence_is_a_dense_one, OWN, True)),
    "fla-org/flash-linear-attention#838": ("forward", f.one_segment,
        partial(test_varlen.test_a_mask_beside_boundaries_does_not_replace_them, OWN, FP32)),
    "flashinfer-ai/flashinfer#3800": ("forward", f.one_token_batch_stride,
        partial(test_varlen.test_every_batch_item_reads_its_own_queries, OWN, FP32)),
    "NVIDIA/TransformerEngine#1259": ("forward", f.one_segment,
        partial(test_varlen.test_packed_documents_in_a_dense_batch_of_one, OWN)),
    "Dao-AILab/flash-attention#2562": ("backward", f.unwritten_dk,
        partial(test_empty.test_sequences_without_a_query, OWN, None)),
    "Dao-AILab/flash-attention#334": ("backward", f.nan_dq, partial(test_empty.test_one_query_and_one_key, OWN, 64)),
    "pytorch/pytorch#196678": ("backward", f.empty_lanes_score_0,
        partial(test_tails.test_low_scores_with_a_mask_tensor, OWN, 64)),
    "Dao-AILab/flash-attention#443": ("backward", f.nan_dq,
        partial(test_tails.test_one_key_per_sequence_and_many_queries, OWN)),
    "ROCm/aiter#3551": ("backward", f.empty_lanes_score_0,
        partial(test_tails.test_low_scores_without_a_mask, OWN, (40, 37))),
    "pytorch/pytorch#103749": ("forward", f.nan_where_nothing_is_seen,
        partial(test_masked_rows.test_a_fully_masked_row, OWN)),
    "Dao-AILab/flash-attention#282": (
        "forward", f.changed_spec("forward", lambda _: {"alignment": "top_left"}),
        partial(test_alignment.test_each_name_has_one_mask, OWN, FP32, (2, 5))),
    "huggingface/transformers#39408": ("forward", f.changed_spec("forward", f.one_more_to_the_left),
        partial(test_windows.test_a_window_of_w_tokens_has_w_keys, OWN, FP32)),
    "NVIDIA/TransformerEngine#3528": ("forward", f.empty_band,
        partial(test_windows.test_minus_one_is_no_number, OWN, (-1, 0))),
    "NVIDIA/TransformerEngine#1197": ("backward", f.changed_spec("backward", f.one_more_to_the_left),
        partial(test_windows.test_every_bound_is_inclusive, OWN, FP32)),
    "Dao-AILab/flash-attention#895": ("forward", f.changed_spec("forward", f.right_bound_of_all_keys),
        partial(test_windows.test_a_huge_bound_is_no_bound, OWN, (12, 5))),
    "XunhaoLai/native-sparse-attention-triton#27": ("backward", f.interleaved_heads,
        partial(test_gqa.test_dv_is_the_sum_over_the_own_heads, OWN, FP32, (6, 2))),
    "pytorch/pytorch#186434": ("forward", f.one_query_is_garbage, partial(test_gqa.test_a_single_query, OWN, None)),
    "marin-community/levanter#449": ("backward", f.last_head_wins,
        partial(test_gqa.test_gradients_of_a_group_are_summed, OWN, FP32)),
    "NVIDIA/TransformerEngine#3216": ("backward", f.delta_of_the_first,
        partial(test_head_dims.test_a_batch_of_two_at_256, OWN)),
    "Dao-AILab/flash-attention#2698": ("backward", f.over_the_next_head,
        partial(test_head_dims.test_a_head_leaves_its_neighbour_alone, OWN, 72, None)),
    "triton-lang/triton#621": ("forward", f.first_columns,
        partial(test_head_dims.test_signal_in_the_last_columns, OWN, FP32)),
    "Dao-AILab/flash-attention#2552": ("backward", f.last_column_of_dv,
        partial(test_head_dims.test_values_narrower_than_keys, OWN, 96)),
    "ROCm/TransformerEngine#364": ("backward", f.columns_of_dq,
        partial(test_head_dims.test_dq_wider_than_values, OWN, FP32, None)),
    "facebookresearch/xformers#755": ("backward", f.other_seed,
        partial(test_dropout.test_the_backward_draws_the_forwards_mask, OWN, "causal")),
    "aws-neuron/nki-samples#81": ("backward", f.plain_ds,
        partial(test_dropout.test_gradients_use_the_plain_probabilities, OWN)),
    "NVIDIA/TransformerEngine#236": ("forward", f.scaled_bias,
        partial(test_bias.test_the_scale_leaves_the_bias_alone, OWN, None)),
    "NVIDIA/TransformerEngine#2537": ("backward", f.dbias_of_one_item,
        partial(test_bias.test_every_shape_of_a_bias_has_its_gradient, OWN, FP32)),
    "meta-pytorch/attention-gym#86": ("forward", f.turned_slopes,
        partial(test_bias.test_alibi_favours_near_keys, OWN, FP32)),
    "Dao-AILab/flash-attention#2402": ("forward", f.FirstOption("softcap"),
        partial(test_scores.test_softcap_bounds_by_the_cap, OWN, FP32)),
    "triton-lang/triton#4541": ("backward", f.changed_spec("backward", lambda _: {"right": 0}),
        partial(test_scores.test_no_causal_mask_in_the_backward_alone, OWN, FP32)),
    "NVIDIA/TransformerEngine#3551": ("backward", f.no_sink_gradient,
        partial(test_sinks.test_the_sink_counts, OWN, FP32)),
    "NVIDIA/cudnn-frontend#676": ("backward", f.nan_dq_of_empty_rows,
        partial(test_sinks.test_an_empty_row_beside_a_sink, OWN)),
    "pytorch/pytorch#181645": ("forward", f.lse_of_base_2,
        partial(test_lse.test_lse_is_a_natural_logarithm, OWN, FP32)),
    "NVIDIA/cudnn-frontend#1083": ("forward", f.lse_of_first_heads,
        partial(test_lse.test_lse_of_every_head_of_a_group, OWN, None)),
    "Dao-AILab/flash-attention#355": ("backward", f.dout_as_contiguous,
        partial(test_strides.test_dout_with_other_strides, OWN)),
    "NVIDIA/TransformerEngine#1195": ("forward", f.keys_as_contiguous,
        partial(test_strides.test_keys_split_off_a_packed_projection, OWN)),
    "pytorch/pytorch#181133": ("forward", f.keys_as_contiguous, partial(test_strides.test_permuted_views, OWN)),
    "triton-lang/triton#6242": ("forward", f.later_items_are_0,
        partial(test_strides.test_ones_in_every_batch_item, OWN, FP32)),
    "Dao-AILab/flash-attention#2082": ("forward", f.maximum_stays_0,
        partial(test_large_logits.test_very_negative_scores_after_a_masked_block, OWN)),
    "NVIDIA/TransformerEngine#716": ("forward", f.merged_through_exp,
        partial(test_large_logits.test_merging_halves_with_lse_near_900, OWN)),
    "Dao-AILab/flash-attention#2244": ("backward", f.Drift(),
        partial(test_repeats.test_many_runs_have_one_result, OWN, (4, 2))),
    "flashinfer-ai/flashinfer#4014": ("forward", f.FirstOption("scale"),
        partial(test_repeats.test_the_same_shapes_with_another_scale_or_stride, OWN, FP32)),
    "NVIDIA/TransformerEngine#630": ("forward", f.FirstMask(),
        partial(test_repeats.test_lengths_belong_to_their_call, OWN, (1, 2))),
    "NVIDIA/TransformerEngine#2186": ("backward", f.garbage_in_padding,
        partial(test_context_parallel.test_chunks_that_are_all_padding, OWN, None)),
    "huggingface/diffusers#14265": ("backward", f.keys_of_step_0,
        partial(test_context_parallel.test_every_step_uses_its_own_keys, OWN)),
    "NVIDIA/TransformerEngine#3248": ("forward", f.scale_of_all_values,
        partial(test_ignored.test_the_future_does_not_leak, OWN, FP32, 40)),
    "jax-ml/jax#23349": ("forward", f.lengths_ignored,
        partial(test_ignored.test_key_lengths_are_honoured, OWN, FP32, "cu_seqlens")),
    "AI-Hypercomputer/maxtext#4476": ("forward", f.one_segment, partial(test_ignored.test_segments_are_honoured, OWN)),
}  # fmt: skip


@pytest.mark.parametrize("public_id", PLANTED)
def test_the_planted_fault_is_found(public_id, monkeypatch):
    half, fault, run = PLANTED[public_id]
    right, calls = getattr(Reference, half), []

    def wrong(self, *given):
        calls.append(given)
        return fault(partial(right, self), *given)

    monkeypatch.setattr(Reference, half, wrong)
    with pytest.raises(AssertionError):
        run()
    assert calls


def test_what_is_planted_is_the_marked_tests_report():
    for public_id, (_, _, run) in PLANTED.items():
        marks = [mark.args[0] for mark in run.func.pytestmark if mark.name == "report"]
        assert marks == [public_id]
