"""The adapters of peers that need a GPU, over stand-ins with the peers' signatures and conventions.

What is judged here is the mapping: arguments, layouts, forms of lse, corners of masks, order of gradients.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import wraps
from importlib.util import find_spec

import pytest
import torch
from tests.backends import fake_peers
from tests.backends.peer_recipes import peer_recipes

from gradtruth.backends import ORDER, PEERS, get
from gradtruth.backends.peers import versions
from gradtruth.backends.peers.installed import importable
from gradtruth.backends.peers.versions import peer_versions
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.support import DEFAULT_CLAIMS, ReasonCode
from gradtruth.core.tensors import Forward
from gradtruth.errors import UnsupportedProblem
from gradtruth.testing import unpoisoned
from gradtruth.verify.suite.conformance import examine, truth_of
from gradtruth.verify.suite.recipe import Recipe
from gradtruth.verify.suite.suite import edges

CUDA = torch.device("cuda")

# What each can beyond ``peer_recipes.PLAIN``, and how many of 40 recipes it must take.
ABLE = {
    "torch_varlen": ({}, 15),
    "aten_flash_varlen": ({}, 15),
    "aten_cudnn_varlen": ({"window": ("none",)}, 15),
    "flash_attn_2": (
        {"alibi": ("none", "H", "BH"), "softcap": ("none", "1.5", "30"), "dims": ("1", "8", "33", "64")},
        15,
    ),
    "flash_attn_3": ({"softcap": ("none", "30"), "dims": ("64", "192/128", "64/128")}, 15),
    "flash_attn_4": (
        {
            "softcap": ("none", "30"), "softmax": ("vanilla", "off-by-one", "learnable"),
            "dlse": ("no", "yes"), "dims": ("64", "96", "192/128"), "wanted": ("all", "dq", "dk,dv", "dsoftmax_offset"),
        },
        12,
    ),
    "xformers": (
        {"heads": ("1/1", "3/3"), "window": ("none", "w,0"), "dtype": ("bfloat16", "float32"), "dims": ("8", "64/128")},
        15,
    ),
    "fla": (
        {
            "mask": ("causal",), "window": ("none", "w,0"), "softmax": ("vanilla", "off-by-one", "learnable"),
            "places": ("full", "ragged", "gaps", "zeros", "left", "tail"), "arrangement": ("contiguous", "3hd", "h3d"),
        },
        10,
    ),
}  # fmt: skip
BOTH_FORMS = {
    "flash_attn_2": ("flash2 dense", "flash2 varlen"),
    "flash_attn_3": ("flash3 dense", "flash3 varlen"),
    "flash_attn_4": ("flash4 dense", "flash4 varlen"),
    "xformers": ("xformers dense", "xformers varlen"),
    "fla": ("fla dense", "fla varlen"),
    "torch_varlen": ("aten flash forward", "aten flash backward"),
    "aten_flash_varlen": ("aten flash forward", "aten flash backward"),
    "aten_cudnn_varlen": ("aten cudnn forward", "aten cudnn backward"),
}


def refused(backend, recipe, sample):
    """Why it is refused, but for the device, which is not there."""
    found = [
        r for r in backend.supports(recipe.problem, CUDA).reasons if r.code is not ReasonCode.DEVICE
    ]
    return found or list(backend.supports_content(sample.problem, sample.inputs).reasons)


@pytest.mark.parametrize("name", ABLE)
def test_mapping(name, monkeypatch):
    fake_peers.install(monkeypatch)
    axes, least = ABLE[name]
    backend, wrong, taken, called = get(name), [], 0, set()
    for at, recipe in enumerate(peer_recipes(40, seed=len(name), **axes)):
        sample = unpoisoned(recipe)
        if refused(backend, recipe, sample):
            continue
        taken += 1
        monkeypatch.setattr(fake_peers, "PACKED_LSE", [at % 2 == 0])
        fake_peers.CALLS.clear()
        wrong += [
            f"{recipe.label()}: {line}" for line in examine(sample, backend, truth_of(sample))
        ]
        called |= set(fake_peers.CALLS)
    assert not wrong, "\n".join(wrong[:8])
    assert taken >= least
    assert called == set(BOTH_FORMS[name])


@pytest.mark.parametrize("name", ["aten_flash_varlen", "aten_cudnn_varlen"])
def test_foreign_out_and_lse(name, monkeypatch):
    fake_peers.install(monkeypatch)
    spec = Spec(layout="thd", lengths="cu_seqlens")
    problem = replace(PROBLEM, spec=spec, seqlen_q=12, seqlen_kv=6)
    recipe = Recipe(problem=problem, places=((0, 5, 0, 0), (5, 7, 0, 6)))
    sample = unpoisoned(recipe)
    forward = get("reference").forward(sample.problem, sample.inputs)
    assert (forward.lse[:5] == -torch.inf).all(), "the kernels want +inf of rows without keys"
    assert get(name).claims(recipe.problem, CUDA).foreign_lse
    grads = get(name).backward(
        sample.problem, sample.inputs, forward, sample.dout, None, sample.wanted
    )
    want = get("reference").backward(
        sample.problem, sample.inputs, forward, sample.dout, None, sample.wanted
    )
    for key, value in want.items():
        assert torch.equal(getattr(grads, key), value)
    assert "forward" not in " ".join(fake_peers.CALLS)


def test_lengths_that_differ_are_refused_when_the_corner_matters(monkeypatch):
    fake_peers.install(monkeypatch)
    for name, alignment in (("flash_attn_4", "top_left"), ("aten_cudnn_varlen", "bottom_right")):
        backend = get(name)
        spec = Spec(layout="thd", lengths="cu_seqlens", right=0, alignment=alignment)
        problem = replace(PROBLEM, spec=spec, seqlen_q=12, seqlen_kv=12)
        square = unpoisoned(Recipe(problem=problem, places=((0, 5, 0, 5), (5, 7, 5, 7))))
        assert not refused(backend, Recipe(problem=problem), square)
        other = unpoisoned(Recipe(problem=problem, places=((0, 5, 0, 5), (5, 7, 5, 6))))
        (reason,) = refused(backend, Recipe(problem=problem), other)
        assert reason.code is ReasonCode.MASK
        assert "sequence 1 has 7 queries and 6 keys" in reason.text
        with pytest.raises(UnsupportedProblem, match="sequence 1 has 7 queries"):
            backend.forward(other.problem, other.inputs)
        with pytest.raises(UnsupportedProblem, match="sequence 1 has 7 queries"):
            run(other, backend)
        open_band = replace(problem, spec=replace(spec, right=None))
        other = replace(other, problem=open_band)
        assert not refused(backend, Recipe(problem=open_band), other)


def run(sample, backend):
    forward = Forward(out=torch.zeros_like(sample.inputs.q), lse=torch.zeros(12, 2))
    return backend.backward(
        sample.problem, sample.inputs, forward, sample.dout, None, sample.wanted
    )


def test_hidden_places_inside_a_sequence_shift_the_diagonal(monkeypatch):
    fake_peers.install(monkeypatch)
    backend = get("flash_attn_2")
    spec = Spec(lengths="padding_mask", right=0, alignment="bottom_right")
    for right, code in ((0, [ReasonCode.LENGTHS]), (None, [])):
        problem = replace(PROBLEM, spec=replace(spec, right=right), seqlen_q=12, seqlen_kv=12)
        recipe = Recipe(problem=problem, places=((0, 9, 0, 9), (3, 9, 3, 9)), holes=True, seed=3)
        sample = unpoisoned(recipe)
        assert [r.code for r in refused(backend, recipe, sample)] == code
        if not code:
            assert examine(sample, backend, truth_of(sample)) == []


PROBLEM = Problem(
    spec=Spec(right=0, alignment="bottom_right"),
    batch=2,
    seqlen_q=8,
    seqlen_kv=8,
    num_heads=2,
    num_gqa_groups=2,
    head_dim_qk=64,
    head_dim_v=64,
    dtype="bfloat16",
)
FLASH = ("torch_varlen", "aten_flash_varlen", "flash_attn_2", "flash_attn_3", "flash_attn_4")
ALL = (*FLASH, "aten_cudnn_varlen", "xformers", "fla")
SPEC_REFUSALS = {
    "max_logit": ({"max_logit": True}, "max_logit", ALL),
    "dropout": ({"dropout_p": 0.25}, "0.25", ALL),
    "lse_grad": ({"lse_grad": True}, "gradient", [n for n in ALL if n != "flash_attn_4"]),
    "softmax": (
        {"softmax": "off-by-one"},
        "off-by-one",
        [n for n in ALL if n not in ("flash_attn_4", "fla")],
    ),
    "softcap": (
        {"softcap": 30.0},
        "30",
        [n for n in ALL if n not in ("flash_attn_2", "flash_attn_3", "flash_attn_4")],
    ),
    "alibi": ({"alibi": True}, "alibi_slopes", [n for n in ALL if n != "flash_attn_2"]),
    "window": ({"left": 2, "right": 1}, "(2, 1)", ("aten_cudnn_varlen", "xformers", "fla")),
    "lengths": ({"lengths": "extents"}, "tile", ALL),
}
SIZE_REFUSALS = {
    "bias": (
        {"bias_shape": (1, 1, 8, 8), "bias_dtype": "bfloat16"}, {"bias": "post_scale"}, "post_scale [1, 1, 8, 8]", ALL,
    ),
    "mask": ({"mask_shape": (1, 1, 8, 8)}, {"arbitrary": True}, "attention_mask is [1, 1, 8, 8]", ALL),
    "dtype": ({"dtype": "float64"}, {}, "float64", ALL),
    "head_dim": ({"head_dim_v": 264}, {}, "264", [n for n in ALL if n != "xformers"]),
    "heads": ({"num_gqa_groups": 1}, {}, "2 query heads share", ("xformers",)),
}  # fmt: skip


def reasons_of(name, problem):
    return [r for r in get(name).supports(problem, CUDA).reasons if r.code is not ReasonCode.DEVICE]


@pytest.mark.parametrize("code", [*SPEC_REFUSALS, *SIZE_REFUSALS])
def test_a_missing_feature_is_refused_and_nothing_else(code, monkeypatch):
    fake_peers.install(monkeypatch)
    if code in SPEC_REFUSALS:
        spec, text, refusing = SPEC_REFUSALS[code]
        problem = replace(PROBLEM, spec=replace(PROBLEM.spec, **spec))
    else:
        sizes, spec, text, refusing = SIZE_REFUSALS[code]
        problem = replace(PROBLEM, spec=replace(PROBLEM.spec, **spec), **sizes)
    for name in ALL:
        assert reasons_of(name, PROBLEM) == []
        found = {r.code: r.text for r in reasons_of(name, problem)}
        assert (ReasonCode(code) in found) is (name in refusing), (name, found)
        assert text in found.get(ReasonCode(code), text)


def test_other_refusals(monkeypatch):
    fake_peers.install(monkeypatch)

    def codes(name, spec=None, **sizes):
        problem = replace(PROBLEM, spec=replace(PROBLEM.spec, **(spec or {})), **sizes)
        return [r.code for r in reasons_of(name, problem)]

    for name in ALL:
        assert codes(name, {"scale": -1.0}) == [ReasonCode.SOFTMAX]
        assert codes(name, {"scale": 0.0}) == [ReasonCode.SOFTMAX]
        square = codes(name, {"alignment": "top_left"})
        assert square == [], "one diagonal where there are as many keys as queries"
        # Only xformers has masks for both corners.
        for alignment, able in (("top_left", "aten_cudnn_varlen"), ("bottom_right", FLASH)):
            found = codes(name, {"alignment": alignment}, seqlen_q=5)
            assert found == ([] if name in able or name == "xformers" else [ReasonCode.MASK])
        assert codes(name, {"right": None}, seqlen_q=5) == (
            [ReasonCode.MASK] if name == "fla" else []
        )
    sink = {"softmax": "learnable", "lse_grad": True}
    assert codes("flash_attn_4", sink) == [ReasonCode.LSE_GRAD]
    assert codes("flash_attn_4", num_gqa_groups=1, head_dim_v=128) == [ReasonCode.HEAD_DIM]
    assert codes("flash_attn_3", head_dim_qk=192, head_dim_v=128) == []
    assert codes("flash_attn_3", head_dim_qk=128, head_dim_v=64) == [ReasonCode.HEAD_DIM]
    assert codes("flash_attn_3", head_dim_qk=256, head_dim_v=256) == [ReasonCode.GUARANTEE]
    assert codes("flash_attn_3", {"deterministic": False}, head_dim_qk=256, head_dim_v=256) == []
    assert codes("xformers", {"left": 2, "alignment": "top_left"}, seqlen_q=5) == [ReasonCode.MASK]
    for major, more in ((10, ReasonCode.HEAD_DIM), (12, ReasonCode.GUARANTEE)):
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
            assert codes("flash_attn_4", head_dim_qk=192, head_dim_v=192) == [more]


def test_not_installed_is_a_reason():
    absent = {
        "flash_attn_2": "flash-attn is not installed: no module 'flash_attn'",
        "flash_attn_3": "flash-attn-3 is not installed: no module 'flash_attn_interface'",
        "flash_attn_4": "flash-attn-4 is not installed: no module 'flash_attn'",
        "xformers": "xformers is not installed: no module 'xformers'",
        "fla": "flash-linear-attention is not installed: no module 'fla'",
    }
    for name, text in absent.items():
        package = text.rpartition("'")[0].rpartition("'")[2]
        if find_spec(package) is not None:
            continue
        for device in (torch.device("cpu"), CUDA, torch.device("meta")):
            found = get(name).supports(PROBLEM, device).reasons
            assert text in [r.text for r in found if r.code is ReasonCode.NOT_INSTALLED]
            shown = {r.text for r in found if r.code is ReasonCode.DEVICE}
            assert (
                device.type == "cuda"
                or f"device is {device.type}, a CUDA device is needed" in shown
            )


def test_a_broken_installation_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "gt_broken_peer.py").write_text("import gt_no_such_dependency\n")
    (tmp_path / "gt_old_peer.py").write_text("forward = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    (reason,) = importable("gt_broken_peer", "broken")
    assert reason.code is ReasonCode.NOT_INSTALLED
    text = "broken cannot be imported: ModuleNotFoundError: No module named 'gt_no_such_dependency'"
    assert reason.text == text
    (reason,) = importable("gt_old_peer", "old", ("forward", "backward"))
    assert reason.code is ReasonCode.VERSION
    assert reason.text == "the installed old has no gt_old_peer.backward"
    assert importable("gt_old_peer", "old", ("forward",)) == []


@pytest.mark.parametrize("name", [*ALL, "sdpa_nested"])
def test_auto_never_takes_a_peer_like_these(name):
    claims = get(name).claims(PROBLEM, CUDA)
    assert {"pure", "shielded", "exact_zeros"} <= set(claims.missing(DEFAULT_CLAIMS))
    assert name in PEERS
    assert ORDER.index(name) > ORDER.index("flex")


def test_determinism_is_claimed_where_it_was_asked_for():
    loose = replace(PROBLEM, spec=replace(PROBLEM.spec, deterministic=False))
    for name in ("flash_attn_2", "flash_attn_3", "flash_attn_4"):
        assert get(name).claims(PROBLEM, CUDA).deterministic
        assert not get(name).claims(loose, CUDA).deterministic


def test_determinism_is_asked_for(monkeypatch):
    fake_peers.install(monkeypatch)
    asked = []
    module = sys.modules["flash_attn.cute"]
    inner = module.flash_attn_func

    @wraps(inner)
    def spy(*tensors, **options):
        asked.append(options["deterministic"])
        return inner(*tensors, **options)

    monkeypatch.setattr(module, "flash_attn_func", spy)
    for deterministic in (True, False):
        problem = replace(PROBLEM, spec=replace(PROBLEM.spec, deterministic=deterministic))
        sample = unpoisoned(Recipe(problem=problem))
        get("flash_attn_4").forward(sample.problem, sample.inputs)
    assert asked == [True, False]


def test_hopper_released_without_an_lse(monkeypatch):
    # Of 2.8.3: out is all there is to ask for.
    fake_peers.install(monkeypatch)

    def old(
        q,
        k,
        v,
        softmax_scale=None,
        causal=False,
        window_size=(-1, -1),
        softcap=0.0,
        deterministic=False,
    ):
        return fake_peers.flash3_func(
            q, k, v, softmax_scale, causal, window_size=window_size, softcap=softcap
        )

    monkeypatch.setattr(sys.modules["flash_attn_interface"], "flash_attn_func", old)
    sample = unpoisoned(Recipe(problem=PROBLEM))
    assert examine(sample, get("flash_attn_3"), truth_of(sample)) == []


def test_older_varlen_attn_knows_no_window(monkeypatch):
    from torch.nn.attention import varlen

    fake_peers.install(monkeypatch)
    new = varlen.varlen_attn

    def old(
        query,
        key,
        value,
        cu_seq_q,
        cu_seq_k,
        max_q,
        max_k,
        is_causal=False,
        *,
        return_aux=None,
        scale=None,
    ):
        window = (-1, 0) if is_causal else (-1, -1)
        return new(
            query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale,
            window_size=window, enable_gqa=True,
        )  # fmt: skip

    monkeypatch.setattr(varlen, "varlen_attn", old)
    windowed = replace(PROBLEM, spec=replace(PROBLEM.spec, left=2))
    assert [r.code for r in reasons_of("torch_varlen", windowed)] == [ReasonCode.VERSION]
    for right in (None, 0):
        problem = replace(PROBLEM, spec=replace(PROBLEM.spec, right=right), num_gqa_groups=1)
        assert reasons_of("torch_varlen", problem) == []
        sample = unpoisoned(Recipe(problem=problem))
        assert examine(sample, get("torch_varlen"), truth_of(sample)) == []


def test_nothing_to_attend(monkeypatch):
    fake_peers.install(monkeypatch)
    for recipe in edges():
        problem = replace(
            recipe.problem, dtype="bfloat16", spec=replace(recipe.problem.spec, right=None)
        )
        sample = unpoisoned(replace(recipe, problem=problem))
        for name in (*ALL, "sdpa_nested"):
            if not reasons_of(name, problem):
                assert examine(sample, get(name), truth_of(sample)) == [], (name, recipe.label())


def test_versions():
    found = peer_versions()
    assert found["torch"] == torch.__version__
    assert next(iter(found)) == "torch"
    assert all(isinstance(text, str) for text in found.values())
    assert "xformers" not in found or find_spec("xformers")
    assert [versions._dotted(n) for n in (91900, 91002, 8907)] == ["9.19.0", "9.10.2", "8.9.7"]


def test_a_window_as_wide_as_the_keys_is_a_causal_kernel(monkeypatch):
    # With ALiBi that kernel's lse is of other scores, so that the reported one cannot be the returned one.
    fake_peers.install(monkeypatch)
    for left in (7, 8, 9):
        spec = replace(PROBLEM.spec, alibi=True, left=left)
        for lengths in ("full", "cu_seqlens"):
            problem = replace(PROBLEM, spec=replace(spec, lengths=lengths))
            sample = unpoisoned(Recipe(problem=problem))
            assert examine(sample, get("flash_attn_2"), truth_of(sample)) == []
