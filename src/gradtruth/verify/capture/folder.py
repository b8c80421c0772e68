"""Folder: where case files go, one line about each in index.jsonl."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from gradtruth.errors import InvalidProblem
from gradtruth.verify.capture.selection import Place
from gradtruth.verify.cases.case import Case

__all__ = ["INDEX", "SUMMARY", "Folder"]

INDEX, SUMMARY = "index.jsonl", "summary.jsonl"
_SUFFIX = ".safetensors"
_LONGEST = 120  # characters of a layer's name in a file's name
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")


class Folder:
    """A folder of cases. Several processes may write to one; no file is written over.

    Args:
        path: is made where it is missing.
        prefix: head of every file's name.

    Raises:
        InvalidProblem: the prefix has characters that a file's name should not have.
        OSError: the folder can be neither found nor made.
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str = "") -> None:
        if not isinstance(prefix, str) or _UNSAFE.search(prefix) or prefix.startswith("."):
            raise InvalidProblem(
                f"prefix is {prefix!r}, expected letters, digits and . _ + -, not a dot first"
            )
        self.path, self._prefix = Path(path), prefix
        self.path.mkdir(parents=True, exist_ok=True)

    def name(self, place: Place) -> str:
        """What the file of a call made there is called, without number and suffix."""
        where = place.layer or re.split(r"[.:]", place.entry)[-1]
        where = _UNSAFE.sub("_", where)[-_LONGEST:].lstrip(".-")
        rank = [] if place.rank is None else [f"rank{place.rank:05}"]
        parts = [self._prefix, *rank, f"step{place.step:06}", where, f"call{place.call}"]
        return "-".join(part for part in parts if part)

    def write(self, name: str, data: bytes) -> Path:
        """Write a file, whole or not at all, under this name or the next that is free."""
        unfinished = self.path / f".{name}.{os.getpid()}.tmp"
        try:
            unfinished.write_bytes(data)
            number = 1
            while True:
                target = self.path / (name + (f".{number}" if number > 1 else "") + _SUFFIX)
                if _moved(unfinished, target):
                    return target
                number += 1
        finally:
            unfinished.unlink(missing_ok=True)

    def append(self, file: str, line: dict[str, Any]) -> None:
        """Add a line, in one write, so that lines of several processes do not mix."""
        text = json.dumps(line, sort_keys=False, ensure_ascii=False) + "\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        handle = os.open(self.path / file, flags, 0o666)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)

    def record(self, path: Path, place: Place, case: Case, facts: dict[str, Any]) -> None:
        """The line about a case."""
        known = {
            "file": path.name,
            "layer": place.layer,
            "step": place.step,
            "call": place.call,
            "rank": place.rank,
            "entry": place.entry,
            "problem": case.problem.label(),
        }
        self.append(INDEX, known | facts)


def _moved(source: Path, target: Path) -> bool:
    """Give a file its name; False where that is taken."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:
        # A file system without links: two processes with one name at one moment are not told apart there.
        if target.exists():
            return False
        source.replace(target)
    return True
