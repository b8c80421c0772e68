"""The minimiser: what it brings planted faults down to, in which order, within which budget, and the script."""

import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.verify.planted import DELTA, DeltaOfTheFirstItem, DoutAsContiguous, Flaky, KeptWorkspace

from gradtruth.backends import get
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import named
from gradtruth.verify.doctor.programme import PROGRAMME, case_of
from gradtruth.verify.edits.arrangement import strided
from gradtruth.verify.edits.crop import lengths_of
from gradtruth.verify.findings import PROCESS, Kind
from gradtruth.verify.minimise.apart import Worker, finder_apart
from gradtruth.verify.minimise.finding import Finding, finder
from gradtruth.verify.minimise.literal import expression, helpers_of
from gradtruth.verify.minimise.minimiser import minimise
from gradtruth.verify.minimise.script import MOST_LINES, script
from gradtruth.verify.minimise.search import Budget
from gradtruth.verify.minimise.size import digest, size
from gradtruth.verify.suite.recipe import Recipe

torch.set_num_threads(1)
REAL = Path(__file__).parents[2] / "examples" / "cases" / "smollm2-d256-sbhd.safetensors"
ITEMS = {item.name: item for item in PROGRAMME}
BACKWARD = named(("backward",))


@pytest.fixture(scope="module")
def real():
    return minimise(
        Case.load(REAL), finder(DeltaOfTheFirstItem, BACKWARD, tensor="dq", kind=Kind.VALUE)
    )


def _recipe(spec, sizes, seed=0, **more):
    B, S, H, G, D = sizes
    problem = Problem(
        spec=spec, batch=B, seqlen_q=S, seqlen_kv=S, num_heads=H, num_gqa_groups=G,
        head_dim_qk=D, head_dim_v=D, dtype="bfloat16",
    )  # fmt: skip
    return Recipe(problem=problem, seed=seed, **more)


def _fits(case, sequences, heads, tokens):
    problem = case.problem
    longest = max((*lengths_of(case)[0], *lengths_of(case)[1]), default=0)
    assert problem.batch <= sequences
    assert problem.num_heads <= heads
    assert longest <= tokens


def test_the_real_case_with_a_batch_mix_up(real):
    """At most 2 sequences x 2 query heads x 32 tokens were asked for."""
    _fits(real.case, 2, 2, 32)
    assert real.case.problem.batch == 2, "a batch of one is right"
    assert (real.finding.check, real.finding.tensor, real.finding.kind) == (
        "backward",
        "dq",
        "value",
    )
    assert real.complete
    assert real.preceding == ()
    assert 1 <= len(real.steps) < real.tried <= 60
    assert real.case.history
    assert finder(DeltaOfTheFirstItem, BACKWARD)(real.calls).tensor == "dq"
    assert finder(lambda: get("reference"), BACKWARD)(real.calls) is None


def test_many_sequences_and_heads():
    """Of the whole size of that model's batch in heads; one pair of sequences is left of six."""
    case = case_of(_recipe(Spec(right=0), (6, 48, 16, 2, 32), family="outlier"))
    found = minimise(case, finder(DeltaOfTheFirstItem, BACKWARD, tensor="dq"))
    _fits(found.case, 2, 2, 32)


def _workspace_calls():
    """Two calls that fill the workspace, and one with keys that no query sees."""
    recipe = ITEMS["thd-gaps-gqa-d128"].recipe
    short = replace(recipe.problem, seqlen_q=60, seqlen_kv=80, head_dim_qk=32, head_dim_v=32)
    full = ((0, 20, 0, 20), (20, 0, 20, 6), (22, 33, 28, 33), (55, 1, 61, 10))
    recipe = replace(recipe, problem=short, places=full)
    places = ((0, 0, 0, 20), (20, 11, 20, 6), (31, 17, 28, 33), (55, 1, 61, 10))
    before = tuple(case_of(replace(recipe, seed=seed)) for seed in (9, 10))
    return before, case_of(replace(recipe, places=places))


@pytest.fixture(scope="module")
def two_calls():
    before, case = _workspace_calls()
    return minimise(case, finder(KeptWorkspace, BACKWARD, tensor="dk"), preceding=before)


def test_the_workspace_of_an_earlier_call(two_calls):
    """At most 2 calls of 2 sequences x 4 tokens were asked for."""
    shows = finder(KeptWorkspace, BACKWARD, tensor="dk")
    assert len(two_calls.calls) == 2
    for call in two_calls.calls:
        _fits(call, 2, 2, 4)
    assert shows((two_calls.case,)) is None
    assert shows(two_calls.calls).same(two_calls.finding)
    assert "earlier calls [0]" in two_calls.steps


def _example():
    """A call with queries in every sequence, and the example with keys that no query sees."""
    example = Case.load(REAL.with_name("thd-gqa-queryless.safetensors"))
    full = example.inputs.cu_seqlens_q_padded
    filled = replace(example.inputs, cu_seqlens_q=full.clone(), cu_seqlens_kv=full.clone())
    return Case.of(example.problem.spec, filled, example.dout), example


def test_strides_that_the_finding_needs_are_kept():
    case = strided(case_of(_recipe(Spec(), (2, 40, 4, 2, 16))), "contiguous", "wide")
    found = minimise(case, finder(DoutAsContiguous, BACKWARD))
    assert not found.case.dout.is_contiguous()
    assert all(found.case.tensors()[name].is_contiguous() for name in ("q", "k", "v"))
    _fits(found.case, 1, 1, 4)


def test_flaky_findings_show_in_k_of_n():
    case = case_of(_recipe(Spec(), (2, 20, 2, 2, 8)))
    flaky = Flaky()
    found = minimise(case, finder(lambda: flaky, BACKWARD, tensor="dv"), confirm=(2, 4))
    _fits(found.case, 1, 1, 2)
    rare = [None] * 3 + [Finding("backward", "dv", Kind.VALUE)]
    with pytest.raises(InvalidProblem, match="shows in 1 of 4 looks, expected 2"):
        minimise(case, lambda _: rare.pop(0), confirm=(2, 4))
    for confirm in ((0, 1), (3, 2)):
        with pytest.raises(InvalidProblem, match="confirm is"):
            minimise(case, lambda _: None, confirm=confirm)


def test_what_shows_less_often_than_k_of_n_is_not_kept():
    case, looks = case_of(_recipe(Spec(), (1, 20, 1, 1, 8))), []

    def shows(calls):
        looks.append(calls)
        often = calls[-1].problem.seqlen_q > 5 or len(looks) % 4 == 0
        return Finding("backward", "dv", Kind.VALUE) if often else None

    assert minimise(case, shows, confirm=(2, 3)).case.problem.seqlen_q == 6


def _planted(variable):
    return f"{Path(__file__).with_name('planted.py')}:{variable}"


def test_a_process_that_dies_is_a_finding():
    case = case_of(_recipe(Spec(), (2, 9, 2, 2, 8)))
    shows = finder_apart(_planted("DIES"), BACKWARD)
    found = minimise(case, shows, budget=Budget(evaluations=10))
    assert (found.finding.check, found.finding.kind) == (PROCESS, Kind.RAISED)
    assert "SIGKILL" in found.finding.detail
    assert found.case.problem.seqlen_q == 5
    assert finder_apart(_planted("DIES"), BACKWARD, tensor="dq")((case,)) is None


def test_a_process_that_hangs_is_given_up():
    case = case_of(_recipe(Spec(), (1, 1, 1, 1, 8)))
    found = finder_apart(_planted("HANGS"), BACKWARD, patience=0.5)((case,))
    assert found is not None
    assert found.detail == "it was not done in time"


def test_processes_do_not_see_each_other():
    """What the look at a call leaves behind is gone in the next."""
    calls = _example()
    shows = finder_apart(_planted("WORKSPACE"), BACKWARD, tensor="dk")
    assert shows(calls) == finder(KeptWorkspace, BACKWARD, tensor="dk")(calls)
    assert shows(calls[1:]) is None


def test_a_process_that_lives_on_is_asked_again_and_replaced_where_it_dies():
    calls = _example()
    worker = Worker()
    shows = finder_apart(_planted("WORKSPACE"), BACKWARD, tensor="dk", worker=worker)
    assert shows(calls[1:]) is None
    assert shows(calls) is not None
    assert shows(calls[1:]) is not None, "what the look before left is seen"
    case = case_of(_recipe(Spec(), (2, 9, 2, 2, 8)))
    dies = finder_apart(_planted("DIES"), BACKWARD, worker=worker)
    for _ in range(2):
        assert dies((case,)).detail.endswith("SIGKILL")
    assert shows(calls[1:]) is None, "another process"
    worker.end()


def test_what_shows_only_in_a_process_that_lives_on_is_taken_back():
    """The cheap question is blind to the earlier call, which the process has seen; the dear one is not."""
    before, case = _workspace_calls()
    cheap = finder(lambda kept=KeptWorkspace(): kept, BACKWARD, tensor="dk")  # noqa: B008
    dear, looks = finder(KeptWorkspace, BACKWARD, tensor="dk"), []

    def again(calls):
        looks.append(calls)
        return dear(calls)

    assert len(minimise(case, cheap, preceding=before).calls) == 1, "the fault that this is about"
    found = minimise(case, cheap, preceding=before, again=again)
    assert len(found.calls) == 2
    assert dear(found.calls).same(found.finding)
    assert len(looks) < found.tried
    for call in found.calls:
        _fits(call, 2, 2, 4)


def test_another_finding_is_not_the_same():
    """What small cases show in another tensor does not count."""
    case = case_of(_recipe(Spec(), (2, 20, 2, 2, 8)))

    def shows(calls):
        large = calls[-1].problem.seqlen_q > 10
        return Finding("backward", "dq" if large else "dk", Kind.VALUE)

    found = minimise(case, shows)
    assert found.finding.tensor == "dq"
    assert found.case.problem.seqlen_q == 11
    assert found.case.problem.batch == found.case.problem.num_heads == 1


def test_another_error_is_not_the_same():
    """A launch that is refused must not become a layout that does not compile."""
    case = case_of(_recipe(Spec(), (2, 20, 2, 2, 8)))

    def shows(calls):
        large = calls[-1].problem.seqlen_q > 10
        error = f"LaunchError: {calls[-1].problem.seqlen_q}" if large else "LayoutError: 1"
        return Finding("backward", None, Kind.RAISED, error)

    found = minimise(case, shows)
    assert found.finding.detail == "LaunchError: 11"
    assert found.case.problem.seqlen_q == 11


def test_nothing_to_minimise():
    case = case_of(_recipe(Spec(), (1, 4, 1, 1, 8)))
    with pytest.raises(InvalidProblem, match="a finding shows in 0 of 1 looks"):
        minimise(case, finder(lambda: get("reference"), BACKWARD))


def test_the_budget_ends_the_search():
    case, looks, said = case_of(_recipe(Spec(right=0), (4, 40, 4, 2, 16))), [], []

    def shows(calls):
        looks.append(calls)
        return Finding("backward", "dq", Kind.VALUE)

    found = minimise(case, shows, budget=Budget(evaluations=3), progress=said.append)
    assert len(looks) == found.tried == 3
    assert not found.complete
    assert size(found.calls) < size((case,))
    assert said[0] == "all values: closed form"
    assert minimise(case, shows, budget=Budget(seconds=0.0)).tried == 1


def test_what_always_shows_becomes_the_smallest_case():
    """Every option, layout and padding goes, and one token of one channel is left, all 0."""
    seen = []
    for name in ("sink-window-gqa-d64", "thd-gaps-gqa-d128", "bias-d64", "mask-d64", "dropout-gqa-d64",
                 "alibi-d64", "padding-mask-d128", "qkv-packed-views-d64"):  # fmt: skip
        case = case_of(ITEMS[name].recipe)
        found = minimise(case, lambda _: Finding("forward", "out", Kind.VALUE))
        problem = found.case.problem
        assert problem.spec == Spec(), name
        assert (problem.batch, problem.num_heads, problem.seqlen_q + problem.seqlen_kv <= 2) == (
            1,
            1,
            True,
        )
        assert (problem.head_dim_qk, problem.head_dim_v, problem.strides) == (1, 1, ()), name
        assert not any(found.case.tensors()[x].any() for x in ("q", "k", "v", "dout"))
        seen.append(found.tried)
    assert max(seen) < 60


def test_fewer_calls_are_smaller_than_fewer_tokens():
    small = case_of(_recipe(Spec(), (1, 2, 1, 1, 8)))
    large = case_of(_recipe(Spec(), (2, 50, 4, 4, 8)))
    assert size((large,)) < size((small, small))
    assert size((small,)) < size((large,))
    assert digest((small,)) != digest((large,))
    assert digest((small,)) == digest((replace(small, history=("x",)),))


# ---------------------------------------------------------------- scripts


def _run(text, folder, capsys):
    """Exit code and output, in this process."""
    path = folder / "reproduce.py"
    path.write_text(text)
    assert len(text.splitlines()) <= MOST_LINES
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    return int(ended.value.code), capsys.readouterr().out


class Named:
    """A planted backend under the name by which another process finds it."""

    def __init__(self, which, variable):
        self._which = which
        self.name = f"{Path(__file__).with_name('planted.py')}:{variable}"

    def __getattr__(self, name):
        return getattr(self._which, name)


@pytest.mark.parametrize("form", ["attention", "check"])
def test_the_script_shows_the_fault(real, tmp_path, capsys, form):
    text = script(real.case, Named(DELTA, "DELTA"), real.finding, form=form)
    code, out = _run(text, tmp_path, capsys)
    assert code == 1, out
    assert "dq" in out
    if form == "attention":
        wrong, right = out.splitlines()
        assert wrong.removeprefix("dq found ") != right.removeprefix("dq right ")
    healthy = text.replace(repr(Named(DELTA, "DELTA").name), "'reference'")
    assert healthy != text
    assert _run(healthy, tmp_path, capsys)[0] == 0


def test_the_script_in_a_process_of_its_own(real, tmp_path):
    path = tmp_path / "reproduce.py"
    path.write_text(script(real.case, Named(DELTA, "DELTA"), real.finding))
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("dq found")
    assert done.stderr == ""


def test_the_script_of_several_calls(two_calls, tmp_path, capsys):
    backend = Named(KeptWorkspace(), "WORKSPACE")
    for form, whole in (("attention", "for call in calls]"), ("check", "calls, 'cpu'")):
        text = script(
            two_calls.case, backend, two_calls.finding, preceding=two_calls.preceding, form=form
        )
        assert whole in text
        get(backend.name).workspace.clear()  # as in a process of its own
        code, out = _run(text, tmp_path, capsys)
        assert code == 1, out
        get(backend.name).workspace.clear()
        alone = text.replace(whole, whole.replace("calls", "calls[1:]"))
        assert _run(alone, tmp_path, capsys)[0] == 0


def test_the_script_of_torch_alone(tmp_path, capsys):
    """A fault of scaled_dot_product_attention, planted by giving another scale."""

    class Scaled(DeltaOfTheFirstItem):
        name = "sdpa_math"

        def backward(self, problem, inputs, forward, dout, dlse, wanted):
            found = get("reference").backward(problem, inputs, forward, dout, dlse, wanted)
            return replace(found, dk=found.dk * 1.5)

    case = case_of(_recipe(Spec(right=0), (1, 3, 2, 1, 4)))
    finding = Finding("backward", "dk", Kind.VALUE)
    text = script(case, Scaled(), finding, form="torch")
    assert "gradtruth" not in text.split('"""')[2]
    assert _run(text, tmp_path, capsys)[0] == 0, "torch is right"
    faulty = text.replace(".double()\nfound",
                          ".double() * 1.5\nfound")  # fmt: skip
    assert faulty != text
    assert _run(faulty, tmp_path, capsys)[0] == 1


def test_the_script_reads_a_case_that_is_too_large_for_it(tmp_path, capsys):
    case, backend = Case.load(REAL), Named(DELTA, "DELTA")
    finding = finder(DeltaOfTheFirstItem, BACKWARD, tensor="dq")((case,))
    for form in ("attention", "check"):
        with pytest.raises(InvalidProblem, match="expected at most"):
            script(case, backend, finding, form=form)
    case.save(tmp_path / "case.safetensors")
    text = script(case, backend, finding, form="check", files=["case.safetensors"])
    code, out = _run(text, tmp_path, capsys)
    assert code == 1, out
    assert "WRONG" in out


def test_what_a_form_cannot_say():
    case = case_of(ITEMS["sink-window-gqa-d64"].recipe)
    finding = Finding("backward", "dq", Kind.VALUE)
    with pytest.raises(InvalidProblem, match="no plain call of torch"):
        script(case, get("sdpa_math"), finding, form="torch")
    with pytest.raises(InvalidProblem, match="than rounding explains"):
        script(case, get("reference"), finding)
    with pytest.raises(InvalidProblem, match="not about a value"):
        script(case, get("reference"), Finding("determinism", "dq", Kind.BITS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_expressions_give_the_same_bits(dtype):
    noise = torch.Generator().manual_seed(0)
    drawn = torch.randn(7, 9, generator=noise).to(dtype)
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), -float("inf"), 0.1]).to(dtype)
    tensors = [
        drawn, special, special[:1], torch.zeros(3, 0, dtype=dtype), torch.zeros(2, 3, dtype=dtype),
        torch.full((2, 2), 0.375, dtype=dtype), drawn.t(), drawn[:, 1:], drawn[:1].expand(4, 9),
        torch.randn(30, 20, generator=noise).to(dtype), -torch.zeros(2, dtype=dtype),
    ]  # fmt: skip
    for tensor in tensors:
        _same_bits(tensor)


def test_expressions_of_integers_and_masks():
    for tensor in (
        torch.tensor([0, 3, 9], dtype=torch.int32), torch.tensor(7), torch.rand(20, 30) > 0.5,
        torch.tensor([True, False]), torch.ones(4, dtype=torch.bool),
    ):  # fmt: skip
        _same_bits(tensor)


def _same_bits(tensor):
    text = expression(tensor)
    modules, numbers, helpers = helpers_of(text)
    scope = {}
    exec(
        "\n".join(
            [f"import {', '.join(['torch', *modules])}", *numbers, *helpers, f"made = {text}"]
        ),
        scope,
    )
    made = scope["made"]
    assert made.shape == tensor.shape
    assert made.dtype == tensor.dtype
    if tensor.numel():
        assert made.stride() == tensor.stride() or tensor.is_contiguous()
        raw = [x.contiguous().view(torch.uint8 if x.dim() else x.dtype) for x in (made, tensor)]
        assert torch.equal(*raw), text
