"""``gradtruth minimise``: the smallest case that still shows a finding, and a script that shows it."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, TypedDict

import typer

from gradtruth.backends import Backend, get
from gradtruth.cli.device import device_of
from gradtruth.cli.progress import progress
from gradtruth.cli.targets import check_targets
from gradtruth.errors import InvalidProblem
from gradtruth.verify.cases.case import Case
from gradtruth.verify.checks import CHECKS, Check, named
from gradtruth.verify.findings import PROCESS, ExitCode, Kind
from gradtruth.verify.minimise.apart import Worker, finder_apart
from gradtruth.verify.minimise.explicit import explicit, in_memory
from gradtruth.verify.minimise.finding import Calls, Finding, Shows, finder
from gradtruth.verify.minimise.minimiser import Minimised
from gradtruth.verify.minimise.minimiser import minimise as search
from gradtruth.verify.minimise.script import FORMS, script
from gradtruth.verify.minimise.search import Budget
from gradtruth.verify.trial import support_of

__all__ = ["minimise"]

_SCRIPT_SECONDS = 600
_DEAR = 3.0  # seconds of a look in a process of its own; then one process looks at many candidates


def minimise(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="CASE...",
            help="Case files: the last one is judged, the others are calls made before it.",
            show_default=False,
        ),
    ],
    backend: Annotated[str, typer.Option(help="Its name, or module:function.")],
    check: Annotated[
        str | None, typer.Option(help="Which check must find it; by default the first that does.")
    ] = None,
    tensor: Annotated[
        str | None, typer.Option(help="In which tensor: out, lse, dq, dk, dv ...; any by default.")
    ] = None,
    kind: Annotated[
        Kind | None, typer.Option(help="Which kind of finding; any by default.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the case; calls before it go beside it, as NAME.before-1.safetensors ...",
        ),
    ] = None,
    script_file: Annotated[
        Path | None,
        typer.Option("--script", metavar="FILE", help="Write a script that shows it, and run it."),
    ] = None,
    budget: Annotated[
        float, typer.Option(metavar="SECONDS", help="No candidate is looked at after so long.")
    ] = 300.0,
    shared: Annotated[
        bool,
        typer.Option(
            "--shared",
            help="Look at all candidates in this process: faster; what one leaves behind, others see.",
        ),
    ] = False,
    confirm: Annotated[
        str, typer.Option(metavar="K/N", help="A candidate shows it where it does in K of N runs.")
    ] = "1/1",
) -> None:
    """Find the smallest case that still shows the same finding: the same check, tensor and kind.

    Exit codes: 0 nothing found, 1 minimised, 2 usage, 3 unsupported.
    """
    where = device_of(device)
    wanted = _confirm(confirm)
    check_targets({"--out": out, "--script": script_file}, files)
    checks = CHECKS if check is None else named((check,))
    calls = tuple(Case.load(path).to(where) for path in files)
    refusal = _refusal(calls, get(backend))
    if refusal is not None:
        print(f"{backend} refuses: {refusal}")
        raise typer.Exit(ExitCode.UNSUPPORTED)
    looker = _Looker(backend, shared)
    looked = _first(calls, looker, checks, (tensor, kind), wanted[1])
    if looked is None:
        print(f"no finding: {files[-1].name} shows none with {backend}")
        raise typer.Exit(ExitCode.VERIFIED)
    calls, finding, dear = looked
    print(f"finding  {finding}")
    print(f"from     {_sizes(calls)}")
    again = checks if finding.check == PROCESS else named((finding.check,))
    with progress(None) as advance:
        found = search(
            calls[-1],
            looker.of(finding, again, kept=dear),
            preceding=calls[:-1],
            confirm=wanted,
            budget=Budget(evaluations=sys.maxsize, seconds=budget),
            progress=advance,
            again=looker.of(finding, again, kept=False) if dear else None,
        )
    _report(found)
    found = _described(found, backend, Case.load(files[-1]).id)
    written = _save(found, out) if out is not None else []
    if script_file is not None:
        _write_script(found, backend, script_file, written)
    raise typer.Exit(ExitCode.FINDINGS)


@dataclass(frozen=True, slots=True)
class _Looker:
    """How calls are looked at."""

    backend: str
    shared: bool
    worker: Worker = field(default_factory=Worker)

    def __call__(
        self,
        checks: tuple[Check, ...],
        tensor: str | None,
        kind: Kind | None,
        *,
        memory: int | None = None,
        kept: bool = False,
    ) -> Shows:
        about: _About = {"tensor": tensor, "kind": kind, "memory": memory}
        if self.shared:
            return finder(lambda: get(self.backend), checks, **about)
        return finder_apart(self.backend, checks, worker=self.worker if kept else None, **about)

    def of(self, finding: Finding, checks: tuple[Check, ...], *, kept: bool) -> Shows:
        """The question whether calls show this finding."""
        return self(checks, finding.tensor, finding.kind, memory=finding.memory, kept=kept)


class _About(TypedDict):
    """What a finding must be in."""

    tensor: str | None
    kind: Kind | None
    memory: int | None


def _first(
    calls: Calls,
    looker: _Looker,
    checks: tuple[Check, ...],
    about: tuple[str | None, Kind | None],
    looks: int,
) -> tuple[Calls, Finding, bool] | None:
    """The finding to keep, the calls that show it, and whether a look in a process of its own is dear."""
    for at, check in enumerate(checks):
        began = time.perf_counter()
        found = _any(calls, looker((check,), *about), looks)
        dear = not looker.shared and time.perf_counter() - began > _DEAR * looks
        if found is None and dear and checks[at + 1 :]:
            found = _any(calls, looker(checks[at + 1 :], *about, kept=True), looks)
        if found is not None:
            return *_written(calls, found, looker, about[1], dear=dear), dear
        if dear:
            return None
    return None


def _any(calls: Calls, shows: Shows, looks: int) -> Finding | None:
    """What the first look finds that finds something."""
    return next((found for _ in range(looks) if (found := shows(calls)) is not None), None)


def _written(
    calls: Calls, found: Finding, looker: _Looker, kind: Kind | None, *, dear: bool
) -> tuple[Calls, Finding]:
    """The finding as one that a check of values makes, where memory or an earlier call brings it about."""
    if found.check == PROCESS or found.tensor is None:
        return calls, found
    case = calls[-1]
    held = in_memory(
        case,
        found,
        lambda values, byte: looker(values, found.tensor, kind, memory=byte, kept=dear),
    )
    if held is not None:
        return (case,), held
    if found.check != "call_order" or len(calls) > 1:
        return calls, found
    written = explicit(case, lambda values: looker(values, found.tensor, None))
    return (calls, found) if written is None else written


def _refusal(calls: Calls, backend: Backend) -> str | None:
    for case in calls:
        support = support_of(case, backend)
        if not support.ok:
            return "; ".join(map(str, support.reasons))
    return None


def _confirm(text: str) -> tuple[int, int]:
    first, slash, second = text.partition("/")
    if not (slash and first.isdigit() and second.isdigit() and 1 <= int(first) <= int(second)):
        raise InvalidProblem(f"--confirm is {text!r}, expected K/N with 1 <= K <= N")
    return int(first), int(second)


def _sizes(calls: Calls) -> str:
    return "; then ".join(case.problem.label() for case in calls)


def _report(found: Minimised) -> None:
    print(f"to       {_sizes(found.calls)}")
    print(f"shows    {found.finding}")
    for at, step in enumerate(found.steps):
        print(f"{'steps    ' if not at else ' ' * 9}{step}")
    end = "" if found.complete else "; the budget ended the search"
    print(f"{found.tried} runs in {found.seconds:.1f} s{end}")


def _described(found: Minimised, backend: str, origin: str) -> Minimised:
    """Where the case comes from, for its file."""
    more = {"minimised_from": origin, "backend": backend, "finding": str(found.finding)}
    case = replace(found.case, provenance={**found.case.provenance, **more}, file_id=None)
    return replace(found, case=case)


def _save(found: Minimised, path: Path) -> list[Path]:
    """Write the calls: their files, preceding ones first."""
    files = [
        path.with_name(f"{path.stem}.before-{at + 1}{path.suffix}")
        for at in range(len(found.preceding))
    ]
    for case, target in zip(found.calls, [*files, path], strict=True):
        case.save(target)
        print(f"wrote {target}")
    return [*files, path]


def _write_script(found: Minimised, backend: str, path: Path, written: list[Path]) -> None:
    """The first form of script that shows the finding in a process of its own, or else the last."""
    last = ""
    for form in FORMS:
        try:
            text = script(
                found.case,
                get(backend),
                found.finding,
                preceding=found.preceding,
                form=form,
                name=backend,
            )
        except InvalidProblem as error:
            last = str(error)
            continue
        if _shows(text, path):
            print(f"wrote {path}; it shows the finding")
            return
        last = "it shows nothing in a process of its own"
    files = written or _save(found, path.with_suffix(".safetensors"))
    names = [str(file.resolve()) if file.parent != path.parent else file.name for file in files]
    text = script(found.case, get(backend), found.finding, form="check", files=names, name=backend)
    if _shows(text, path):
        print(f"wrote {path}; with the case files beside it, it shows the finding")
    else:
        print(f"wrote {path}; {last}: the finding may need what this process did before")


def _shows(text: str, path: Path) -> bool:
    path.write_text(text, encoding="utf-8")
    command = [sys.executable, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_SCRIPT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return False
    # An exception that nobody catches gives 1 too.
    return done.returncode == 1 and b"Traceback" not in done.stderr
