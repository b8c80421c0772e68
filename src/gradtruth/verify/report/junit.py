"""JUnit XML: rows as tests, for CI systems that show them."""

from __future__ import annotations

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from gradtruth.verify.findings import Row, Run, Verdict
from gradtruth.verify.report.cells import one_line, place, share

__all__ = ["junit"]

_FAILURE = {Verdict.WRONG: "failure", Verdict.ERROR: "error"}
_SKIPPED = (Verdict.REFUSES, Verdict.NOT_CLAIMED, Verdict.NOT_REACHED)


def junit(run: Run) -> str:
    """The run as JUnit XML: a suite per backend, a test per row, what says nothing about a backend as skipped."""
    root = Element("testsuites", name="gradtruth")
    for backend in dict.fromkeys(row.backend for row in run.rows):
        rows = [row for row in run.rows if row.backend == backend]
        suite = SubElement(root, "testsuite", name=backend, tests=str(len(rows)))
        suite.set("failures", str(sum(row.verdict is Verdict.WRONG for row in rows)))
        suite.set("errors", str(sum(row.verdict is Verdict.ERROR for row in rows)))
        suite.set("skipped", str(sum(row.verdict in _SKIPPED for row in rows)))
        facts = SubElement(suite, "properties")
        for name, value in run.facts.items():
            SubElement(facts, "property", name=name, value=one_line(str(value)))
        for row in rows:
            suite.append(_test(row))
    indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _test(row: Row) -> Element:
    name = " ".join(filter(None, (row.case, row.check, row.tensor)))
    test = Element("testcase", classname=f"{row.backend}.{row.check}", name=name)
    test.set("time", f"{row.seconds or 0:.3f}")
    text = one_line("; ".join(row.detail))
    if row.verdict in _FAILURE:
        used = f" {share(row.worst.used)} of the budget at {place(row.worst)}" if row.worst else ""
        found = SubElement(
            test, _FAILURE[row.verdict], message=f"{row.verdict.value}:{used} {text}"
        )
        found.set("type", row.kind.value if row.kind else row.verdict.value)
    elif row.verdict in _SKIPPED:
        SubElement(test, "skipped", message=f"{row.verdict.value}: {text}")
    return test
