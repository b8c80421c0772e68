"""A shelf: what one process computed is what another reads, bit for bit, under the same name in every check."""

from dataclasses import replace

import pytest
import torch

from gradtruth.backends import get
from gradtruth.verify import standard as module
from gradtruth.verify.checks import CHECKS
from gradtruth.verify.checks.subject import Subject
from gradtruth.verify.checks.verdicts import differences
from gradtruth.verify.doctor.examination import examine, prepare
from gradtruth.verify.doctor.programme import PROGRAMME, case_of
from gradtruth.verify.findings import Row
from gradtruth.verify.shelf import Shelf
from gradtruth.verify.standard import Standard

ITEMS = {item.name: item for item in PROGRAMME}
SMALL = "thd-queryless-gqa-d8"
CPU = torch.device("cpu")


def _same(found, expected):
    assert set(found.values) == set(expected.values)
    for name, value in expected.values.items():
        for got, want in (
            (found.values[name], value),
            (found.magnitudes[name].bound, expected.magnitudes[name].bound),
            (found.magnitudes[name].spread, expected.magnitudes[name].spread),
            (found.yardstick[name], expected.yardstick[name]),
        ):
            assert torch.equal(got, want), name


@pytest.mark.parametrize("name", [SMALL, "decode-gqa-d128", "sink-window-gqa-d64"])
def test_a_standard_from_the_shelf_is_the_one_that_was_put_there(name, tmp_path, monkeypatch):
    case = case_of(ITEMS[name].recipe)
    filled = Standard(case, shelf=Shelf(tmp_path, fills=True), name="x")
    filled.prepare(yardstick=True, foreign=True)
    plain = Standard(case)
    own, foreign, given = plain.own, plain.foreign, plain.given
    monkeypatch.setattr(module.oracle, "evaluate", None)
    monkeypatch.setattr(module.oracle, "backward", None)
    monkeypatch.setattr(module, "run_forward", None)
    read = Standard(case, shelf=Shelf(tmp_path), name="x")
    _same(read.own, own)
    _same(read.foreign, foreign)
    assert torch.equal(read.given.lse, given.lse)
    assert read.given.out.dtype == case.problem.torch_dtype


def test_a_process_that_runs_backends_puts_nothing_on_the_shelf(tmp_path):
    standard = Standard(case_of(ITEMS[SMALL].recipe), shelf=Shelf(tmp_path), name="x")
    _ = standard.own, standard.foreign
    assert list(tmp_path.iterdir()) == []


def test_names_are_kept_apart_and_an_interrupted_file_is_none(tmp_path):
    shelf = Shelf(tmp_path, fills=True)
    for name, value in (("a", 1.0), ("b/../a", 2.0)):
        shelf.kept(name, lambda value=value: {"x": torch.tensor([value])})
    assert [float(Shelf(tmp_path).kept(name, dict)["x"]) for name in ("a", "b/../a")] == [1.0, 2.0]
    (tmp_path / "rest.1.tmp").write_bytes(b"cut")
    assert Shelf(tmp_path).kept("c", dict) == {}


class _Recording(Standard):
    """Remembers what checks ask for."""

    asked: dict

    def derived(self, key, case):
        self.asked[key] = case
        return super().derived(key, case)


@pytest.mark.parametrize("name", [SMALL, "one-key-d64", "full-fp32-d64"])
def test_what_a_check_asks_for_is_what_it_says_beforehand(name):
    case, reached = case_of(ITEMS[name].recipe), 0
    for check in CHECKS:
        if check.device is not None or check.once:
            continue
        standard = _Recording(case)
        standard.asked = {}
        list(check.run(Subject(case, get("unfused"), standard)))
        said = check.derived(case)
        # The same content, whatever the strides of memory that views share.
        assert {key: part.id for key, part in standard.asked.items()} == {
            key: part.id for key, part in said.items()
        }, check.name
        reached += len(said)
    assert reached >= 8


def test_an_examination_beside_a_shelf_says_what_one_without_says(tmp_path, monkeypatch):
    item = ITEMS[SMALL]
    checks = [check for check in CHECKS if check.quick]
    plain = _rows(examine([item], [get("reference")], checks, CPU))
    prepare(item, checks, CPU, Shelf(tmp_path, fills=True))
    monkeypatch.setattr(module.oracle, "evaluate", None)
    monkeypatch.setattr(module.oracle, "backward", None)
    assert _rows(examine([item], [get("reference")], checks, CPU, Shelf(tmp_path))) == plain


def _rows(events):
    return [replace(event, seconds=None) for event in events if isinstance(event, Row)]


@pytest.fixture(scope="module")
def subject():
    case = case_of(ITEMS[SMALL].recipe)
    return Subject(case, get("reference"), Standard(case))


def _changed(tensor, at, value):
    changed = tensor.contiguous().clone()
    changed.view(-1)[at] = value
    return changed


def test_equal_bits_are_no_difference(subject, monkeypatch):
    results = dict(subject.first.tensors)
    for name, tensor in results.items():
        rows = [
            row for row in subject.standard.apart(name, tensor, tensor) if row.sequence is not None
        ]
        assert all(row.used == 0 for row in rows), "what is passed over would be no finding"
    monkeypatch.setattr(Standard, "apart", None)
    assert (
        list(differences(subject, results, {n: t.clone() for n, t in results.items()}, "x")) == []
    )


@pytest.mark.parametrize(
    ("value", "names"), [(float("nan"), ("out", "lse", "dq")), (float("inf"), ("out", "dq"))]
)
def test_equal_bits_that_are_no_numbers_are_a_finding(subject, value, names):
    for name in names:  # an lse may be over the largest number, and then +inf is right
        inside = int(subject.standard.own.magnitudes[name].bound.reshape(-1).nonzero()[0])
        broken = {name: _changed(subject.first.tensors[name], inside, value)}
        (found,) = differences(subject, broken, broken, "x")
        assert found.tensor == name


def test_equal_bits_where_nothing_contributes_are_a_finding(subject):
    dk = subject.first.tensors["dk"]
    nothing = subject.standard.own.magnitudes["dk"].bound == 0
    inside = [int(at) for at in nothing.view(-1).nonzero()]
    stray = {"dk": _changed(dk, inside[0], 1.0)}
    (found,) = differences(subject, stray, stray, "x")
    assert "where nothing contributes" in found.detail[0]


def test_another_sign_of_zero_is_looked_at_and_no_difference(subject):
    out = subject.first.tensors["out"]
    assert list(differences(subject, {"out": out}, {"out": out + 0.0}, "x")) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_on_a_gpu_results_are_judged_on_the_cpu(tmp_path):
    item = ITEMS[SMALL]
    checks = [check for check in CHECKS if check.quick]
    prepare(item, checks, torch.device("cuda"), Shelf(tmp_path, fills=True))
    for backend in ("reference", "unfused"):
        events = examine([item], [get(backend)], checks, torch.device("cuda"), Shelf(tmp_path))
        assert [row for row in _rows(events) if row.kind] == []
    standard = Standard(
        case_of(item.recipe, "cuda"), where=CPU, shelf=Shelf(tmp_path), name=item.name
    )
    assert {x.device.type for x in standard.own.values.values()} == {"cpu"}
    assert standard.given.out.device.type == "cuda"
