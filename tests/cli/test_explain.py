"""``gradtruth explain`` and what all commands share."""

import subprocess
import sys

import pytest
import torch

from gradtruth.backends import ORDER
from gradtruth.cli.main import main


def test_every_backend_has_a_line(capsys):
    options = "--batch 2 --seqlen-q 64 --heads 8 --groups 2 --head-dim 128 --dtype bfloat16 --mask causal --window 32,0"
    assert main(["explain", *options.split()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "b2 s64 h8/2 d128 bf16 bshd window(32,0) on cpu"
    table = [line.split() for line in lines[3:]]
    assert [line[0] for line in table] == list(ORDER)
    assert [line[1] for line in table].count("forward") == 1
    assert all(len(line) > 2 for line in table), "each other one has a reason"


def test_a_named_backend_that_refuses(capsys):
    assert main(["explain", "--backend", "sdpa_math", "--softmax", "learnable"]) == 3
    found = capsys.readouterr()
    assert found.out == ""
    assert "sdpa_math" in found.err
    assert "learnable" in found.err


def test_two_backends(capsys):
    assert main(["explain", "--backend", "unfused,reference"]) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    assert [line.split()[:2] for line in lines] == [
        ["unfused", "forward"],
        ["reference", "backward"],
    ]


@pytest.mark.parametrize(
    ("options", "label"),
    [
        ("--qkv-format thd --mask padding_causal --batch 3", "b3 s3072 h16/16 d64 bf16 thd causal"),
        ("--qkv-format sbhd --packing 3hd", "sbhd(3hd) full"),
        ("--packing h2d --groups 4", "h16/4 d64 bf16 bshd(h2d) full"),
        ("--head-dim 192 --head-dim-v 128", "d192/128"),
        ("--bias pre_scale --bias-shape st", "pre_scale[1,1,1024,1024]"),
        ("--alibi --mask arbitrary,causal", "arbitrary causal alibi"),
        ("--softmax off-by-one --softcap 30", "softcap30 off-by-one"),
        ("--dropout 0.1 --seqlen-kv 5", "s1024 t5"),
        ("--mask padding --window 8,-1 --top-left", "padding window(8,-1)"),
    ],
)
def test_options_become_the_problem(capsys, options, label):
    assert main(["explain", "--backend", "reference", *options.split()]) == 0
    assert label in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtype int8", "--dtype is 'int8'"),
        ("--bias pre", "--bias is 'pre'"),
        ("--bias pre_scale --bias-shape X", "--bias-shape is 'X'"),
        ("--packing 4hd", "--packing is '4hd'"),
        ("--packing 3hd --groups 2", "packing is '3hd'"),
        ("--packing 3hd --head-dim-v 8", "equal head dims"),
        ("--window 3", "--window is '3'"),
        ("--window=-2,0", "window_size is (-2, 0)"),
        ("--mask foo", "attn_mask_type is 'foo'"),
        ("--qkv-format thd", "qkv_format 'thd'"),
        ("--qkv-format bhsd", "qkv_format is 'bhsd'"),
        ("--heads 5 --groups 2", "multiple of key's 2 heads"),
        ("--heads 0", "--heads"),
        ("--batch x", "--batch"),
        ("--softcap -1", "softcap is -1.0"),
        ("--dropout 1.5", "dropout_p is 1.5"),
        ("--softmax relu", "softmax_type is 'relu'"),
        ("--mask causal --bottom-right", "bottom_right_diagonal is True"),
        ("--backend nobody", "backend is 'nobody'"),
        ("--device meta", "--device is 'meta'"),
        ("--device cuda:99999", "CUDA devices"),
        ("--batch 10000000000000", "[10000000000000, 1024, 16, 64]"),
        ("--head-dim 99999999999999999999999", "99999999999999999999999]"),
        ("--device quantum", "--device is 'quantum'"),
    ],
)
def test_usage_is_one_line_on_stderr(capsys, options, message):
    assert main(["explain", *options.split()]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert message in found.err


def test_version(capsys):
    assert main(["--version"]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == "gradtruth"
    assert f"(torch {torch.__version__}," in " ".join(words)


def test_without_a_command_it_helps(capsys):
    assert main([]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert "verify" in found.err
    assert "explain" in found.err


def _isolated(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_a_missing_extra_is_one_line():
    found = _isolated(
        "import sys; sys.modules['typer'] = None\n"
        "from gradtruth.cli.main import main\n"
        "sys.exit(main(['explain']))"
    )
    assert found.returncode == 2
    assert found.stderr == "gradtruth: error: typer is not installed; pip install gradtruth[tool]\n"


def test_the_instrument_needs_no_extra():
    found = _isolated(
        "import sys\n"
        "for name in ('typer', 'rich', 'jinja2', 'matplotlib'): sys.modules[name] = None\n"
        "import io, pkgutil, importlib, gradtruth.verify as package\n"
        "for module in pkgutil.walk_packages(package.__path__, 'gradtruth.verify.'):\n"
        "    importlib.import_module(module.name)\n"
        "from gradtruth.verify.report.console import print_verification\n"
        "print_verification([], io.StringIO())\n"
    )
    assert (found.returncode, found.stderr) == (0, "")
