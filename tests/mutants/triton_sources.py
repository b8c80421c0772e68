"""Mechanical mutants of the Triton kernels: one operator, bound, stride, factor or fill value changed in each.

    python -m tests.mutants.triton_sources --count 220 --jobs 2 --out benchmarks/results/triton-mutants.json

Every mutant is a copy of the kernels' folder with one change. A process that has Triton's interpreter, the samples
and the oracle's answers ready forks a child for each; the child imports the changed kernels and runs the sample of
``tests/backends/triton_sample.py`` until something is wrong: a number out of budget, an address outside of the
tensors, an error, a crash, a hang.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "src/gradtruth/backends/triton/kernels"
PACKAGE = "gradtruth.backends.triton.kernels"
PATIENCE = 240  # seconds of CPU of a mutant; the healthy kernels take a quarter

_COMPARED = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
             ast.Eq: ("==", "!=")}  # fmt: skip
_ADDED = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.BitAnd: ("&", "|"),
    ast.FloorDiv: ("//", "*"),
}
_CALLED = {"maximum": "minimum", "minimum": "maximum", "max": "min", "exp2": "exp", "log": "log2"}
_STRIDES = ("_sb", "_ss", "_sh", "_sd", "_si", "_sj", "_sp")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file: characters [begin, end) become ``new``."""

    file: str
    line: int
    kind: str
    begin: int
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """Where and what."""
        return f"{self.file}:{self.line} {self.kind} {self.old!r} -> {self.new!r}"


class _Sites(ast.NodeVisitor):
    """Every place of one file that a mutant can change."""

    def __init__(self, file: Path) -> None:
        self.file, self.text = file.name, file.read_text()
        self.starts = [0]
        for line in self.text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.visit(ast.parse(self.text))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._between("comparison", node.left, node.comparators[0], _COMPARED, node.ops[0])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        self._between("operator", node.left, node.right, _ADDED, node.op)
        if isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Name):
            begin, end = self._end(node.left), self._end(node)
            if node.right.id in ("scale", "factor", "inverse_keep", "LN2", "LOG2E", "softcap"):
                self._add("factor", node, begin, end, "")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, (ast.Mult, ast.Add, ast.Sub)):
            self._add("statement", node, self._at(node), self._end(node), "pass")
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id.endswith(_STRIDES):
            self._add("stride", node, self._at(node), self._end(node), "0")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add("flag", node, self._at(node), self._end(node), str(not node.value))

    def visit_Call(self, node: ast.Call) -> None:
        called = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if called in _CALLED and isinstance(node.func, ast.Attribute):
            end = self._end(node.func)
            self._add("function", node, end - len(called), end, _CALLED[called])
        if called == "cdiv":
            a, b = (ast.get_source_segment(self.text, x) for x in node.args)
            self._add("rounding", node, self._at(node), self._end(node), f"(({a}) // ({b}))")
        if called == "range":
            last = node.args[1]
            self._add("limit", node, self._end(last), self._end(last), " - 1")
            first = node.args[0]
            self._add("limit", node, self._end(first), self._end(first), " + 1")
        if called == "where":
            mask = node.args[0]
            self._add("mask", node, self._at(mask), self._end(mask), "True")
            return
        for keyword in node.keywords:
            if keyword.arg == "other":
                old = ast.get_source_segment(self.text, keyword.value)
                new = "1.0" if old in ("0.0", "0") else "0"
                self._add("fill", node, self._at(keyword.value), self._end(keyword.value), new)
        self.generic_visit(node)

    def _between(self, kind: str, left: ast.AST, right: ast.AST, table: dict, op: ast.AST) -> None:
        if type(op) not in table:
            return
        old, new = table[type(op)]
        at = self.text.find(old, self._end(left), self._at(right))
        if at >= 0:
            self._add(kind, left, at, at + len(old), new)

    def _at(self, node: ast.AST) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.AST) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def _add(self, kind: str, node: ast.AST, begin: int, end: int, new: str) -> None:
        old = self.text[begin:end]
        self.found.append(Mutant(self.file, node.lineno, kind, begin, end, old, new))


def mutants(count: int, seed: int = 0) -> list[Mutant]:
    """A seeded sample, as many of every kind as there can be; kinds and files take turns."""
    sites = [m for file in sorted(KERNELS.glob("[!_]*.py")) for m in _Sites(file).found]
    random.Random(seed).shuffle(sites)
    shelves: dict[tuple[str, str], list[Mutant]] = {}
    for site in sites:
        shelves.setdefault((site.kind, site.file), []).append(site)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(shelves.values()):
        for key in sorted(shelves):
            if shelves[key] and len(chosen) < count:
                chosen.append(shelves[key].pop())
    return chosen


class Suite:
    """The samples with the oracle's answers, and what runs them on the kernels that are imported."""

    def __init__(self, budget: float) -> None:
        os.environ["TRITON_INTERPRET"] = "1"
        from tests.backends import triton_sample

        triton_sample.mended()
        import torch

        from gradtruth.verify.suite.conformance import truth_of
        from gradtruth.verify.suite.inputs import make

        torch.set_num_threads(1)
        recipes = triton_sample.selection(budget)
        self.samples = [
            (r.label(), s, truth_of(s), triton_sample.cost(r)) for r in recipes if (s := make(r))
        ]

    def first_fault(self) -> str:
        """What is found first; empty when nothing is."""
        from tests.backends import triton_sample

        shared = [x for x in self.samples if triton_sample.sharing_matters(x[1].problem)]
        whole = sorted(self.samples, key=lambda x: x[3])  # the cheap ones find most mutants
        with triton_sample.interpreted_backend() as backend:
            for on, samples in ((False, whole[:-9]), (True, shared[:8:2]), (False, whole[-9:])):
                for label, sample, truth, _ in samples:
                    with triton_sample.shared_out(on):
                        wrong = triton_sample.examined(sample, backend, truth)
                    if wrong:
                        return f"{label}: {wrong[0]}"
            more = triton_sample.documents_faults(backend) + triton_sample.hostile_faults(backend)
        return triton_sample.sequences_fault() or "; ".join(more)


def verdict(mutant: Mutant | None, suite: Suite) -> tuple[bool, str]:
    """Whether a mutant was found, and how; None is the healthy kernels."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        resource.setrlimit(resource.RLIMIT_CPU, (PATIENCE, PATIENCE + 9))  # the fork starts at 0
        text = ""
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with tempfile.TemporaryDirectory() as place:
                if mutant is not None:
                    _install(mutant, Path(place))
                text = suite.first_fault()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(writing, (text.splitlines() or [""])[0][:300].encode())
        os._exit(1 if text else 0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return True, "it never ends" if name == "SIGXCPU" else f"it crashes: {name}"
    return os.WEXITSTATUS(status) != 0, text


def _install(mutant: Mutant, place: Path) -> None:
    """Let the package of the kernels be a changed copy."""
    import gradtruth.backends.triton as room

    target = place / "gradtruth_mutant"
    for file in KERNELS.glob("*.py"):
        text = file.read_text()
        if file.name == mutant.file:
            text = text[: mutant.begin] + mutant.new + text[mutant.end :]
        (target / "kernels").mkdir(parents=True, exist_ok=True)
        (target / "kernels" / file.name).write_text(text)
    room.__path__.insert(0, str(target))


def main() -> None:
    """Run mutants and write what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=220)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=300.0)
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), help="index and number of parts"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    suite = Suite(given.budget)
    healthy = verdict(None, suite)
    if healthy[0]:
        sys.exit(f"the kernels are wrong without a mutant: {healthy[1]}")
    rows = []
    for mutant in mutants(given.count, given.seed)[given.part[0] :: given.part[1]]:
        begin = time.perf_counter()
        killed, how = verdict(mutant, suite)
        rows.append({**asdict(mutant), "killed": killed, "how": how})
        seconds = time.perf_counter() - begin
        print(
            "killed  " if killed else "SURVIVED",
            mutant.name,
            f"{seconds:.1f} s",
            how[:90],
            flush=True,
        )
        if given.out:
            given.out.write_text(json.dumps(rows, indent=1) + "\n")
    dead = sum(row["killed"] for row in rows)
    print(f"{dead} of {len(rows)} killed")


if __name__ == "__main__":
    main()
