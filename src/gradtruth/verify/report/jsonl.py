"""JSON: one document with everything, or JSON lines with a row each."""

from __future__ import annotations

import json
from pathlib import Path

from gradtruth.verify.findings import Run

__all__ = ["write_json"]

_FORMAT = 1


def write_json(run: Run, path: Path) -> None:
    """Write the run: JSON lines of rows for a name in .jsonl, else one document.

    The document is an object of format (1), facts, cases and rows. A row has the fields of ``findings.Row``; numbers
    that JSON lacks are the texts "inf", "-inf" and "nan".
    """
    rows = [row.to_json() for row in run.rows]
    if path.suffix == ".jsonl":
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    else:
        document = {"format": _FORMAT, "facts": run.facts, "cases": run.cases, "rows": rows}
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    path.write_text(text, encoding="utf-8")
