"""A small Llama of transformers, with its sdpa and its eager attention."""

import pytest
import torch
from tests.capture.captured import cases, results
from torch.testing import assert_close

import gradtruth
from gradtruth.backends import get
from gradtruth.verify.checks import named
from gradtruth.verify.engine import verify_case
from gradtruth.verify.findings import Row, Verdict

transformers = pytest.importorskip("transformers", reason="an extra: pip install gradtruth[real]")


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("way", ["sdpa", "eager"])
def test_llama(tmp_path, model, way, padded):
    model.set_attn_implementation(way)
    tokens = torch.arange(2 * 9).view(2, 9) % 32
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, 5:] = 0
    seen = []
    layer = model.model.layers[1].self_attn
    handle = layer.v_proj.register_full_backward_hook(lambda _m, _i, out: seen.append(out[0]))
    with gradtruth.capture(tmp_path, layer="model.layers.*.self_attn") as captured:
        model(tokens, attention_mask=mask, labels=tokens).loss.backward()
    handle.remove()
    assert not captured.tally.skipped, captured.summary()
    last, first = cases(captured)
    assert first.provenance["layer"] == "model.layers.0.self_attn"
    assert last.provenance["layer"] == "model.layers.1.self_attn"
    dv = results(last)["dv"]
    assert last.problem.num_gqa_groups == (4 if way == "sdpa" and padded else 2)
    if last.problem.num_gqa_groups == 4:
        # Under a mask, keys and values are repeated for each query head before the call.
        dv = dv.unflatten(2, (2, 2)).sum(3)
    # The eager one takes its softmax in fp32.
    assert_close(dv.flatten(2), seen[0], rtol=1e-5 if way == "eager" else 1e-9, atol=1e-8)
    if way == "sdpa":
        rows = [
            event
            for event in verify_case(last, [get("reference")], name="x", checks=named(("values",)))
            if isinstance(event, Row)
        ]
        assert {row.verdict for row in rows} == {Verdict.RIGHT}
