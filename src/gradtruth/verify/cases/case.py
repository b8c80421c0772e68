"""Case: a problem with its tensors, an upstream gradient and where they come from; one file each."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gradtruth.arguments import Options, TensorArguments, check_contents
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.errors import CaseFormatError, InvalidProblem
from gradtruth.verify.cases import container, storage
from gradtruth.verify.cases.agreement import problem_of
from gradtruth.verify.cases.provenance import Provenance

__all__ = ["Case"]

_FORMAT = 1
_DOCUMENT = {"format", "problem", "views", "provenance", "history"}
_INPUTS = tuple(f.name for f in fields(Inputs))
_TENSORS = (*_INPUTS, "dout", "dlse")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One attention problem with everything that is needed to run its forward and its backward.

    Attributes:
        problem: what is computed. ``Case.of`` derives it from the tensors.
        inputs: tensors of any strides on one device.
        dout: gradient of out: q's shape with last dim Dv, any strides.
        dlse: gradient of lse, or None.
        provenance: names to texts or ints: device, versions, model, layer ... (see ``machine_facts``).
        history: the reductions that were applied to get here.
        file_id: SHA-256 of the file that it was read from.
    """

    problem: Problem
    inputs: Inputs
    dout: Tensor
    dlse: Tensor | None = None
    provenance: Provenance = field(default_factory=dict)
    history: tuple[str, ...] = ()
    file_id: str | None = None

    def __post_init__(self) -> None:
        bounds = self.problem.max_seqlen_q, self.problem.max_seqlen_kv
        found = problem_of(self.problem.spec, self.inputs, self.dout, self.dlse, bounds)
        if found != self.problem:
            raise InvalidProblem(
                f"problem is {self.problem.encode()}, its tensors say {found.encode()}"
            )
        for name, value in self.provenance.items():
            if not isinstance(name, str) or type(value) not in (str, int):
                raise InvalidProblem(
                    f"provenance has {name!r}: {value!r}, expected names to texts or ints"
                )
        if not all(isinstance(step, str) for step in self.history):
            raise InvalidProblem(f"history is {self.history!r}, expected texts")

    @staticmethod
    def of(
        spec: Spec,
        inputs: Inputs,
        dout: Tensor,
        dlse: Tensor | None = None,
        *,
        max_seqlen: tuple[int | None, int | None] = (None, None),
        provenance: Provenance | None = None,
    ) -> Case:
        """The case of these tensors.

        Args:
            spec: the size-free part of the problem.
            inputs: its tensors, on one device.
            dout: gradient of out.
            dlse: gradient of lse; the Spec must have ``lse_grad``.
            max_seqlen: bounds on the length of a query and a key sequence.
            provenance: where it comes from.

        Raises:
            InvalidProblem: a tensor is missing, not expected, or of the wrong shape, dtype or device.
        """
        problem = problem_of(spec, inputs, dout, dlse, max_seqlen)
        return Case(
            problem=problem, inputs=inputs, dout=dout, dlse=dlse, provenance=provenance or {}
        )

    @property
    def id(self) -> str:
        """SHA-256 of its file: the one it was read from, else the one that ``save`` would write."""
        return self.file_id or hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return self.inputs.q.device

    def tensors(self) -> dict[str, Tensor]:
        """All its tensors by name: those of ``inputs``, dout, and dlse when there is one."""
        found = dict(self.inputs.items())
        found["dout"] = self.dout
        if self.dlse is not None:
            found["dlse"] = self.dlse
        return found

    def to(self, device: torch.device | str) -> Case:
        """The same case on another device: strides, offsets and shared storage as they are."""
        bases, views = storage.split(self.tensors())
        moved = storage.join({name: base.to(device) for name, base in bases.items()}, views)
        return replace(self, **_parts(moved))

    def to_bytes(self) -> bytes:
        """The content of its file, format 1. The same case gives the same bytes."""
        bases, views = storage.split(self.tensors())
        document = {
            "format": _FORMAT,
            "problem": json.loads(self.problem.encode()),
            "views": {name: _encode_view(view) for name, view in views.items()},
            "provenance": dict(self.provenance),
            "history": list(self.history),
        }
        return container.wrap(bases, _canonical(document))

    @staticmethod
    def from_bytes(data: bytes) -> Case:
        """The case of a file's bytes, on the CPU.

        Raises:
            CaseFormatError: the bytes are damaged, contradict themselves, or are of another format version.
        """
        bases, text = container.unwrap(data)
        document = _document(text)
        views = _decode_views(document["views"])
        try:
            parts = _parts(storage.join(bases, views))
            problem = Problem.decode(_canonical(document["problem"]))
            case = Case(
                problem=problem,
                **parts,
                provenance=document["provenance"],
                history=tuple(document["history"]),
                file_id=hashlib.sha256(data).hexdigest(),
            )
            _check_lengths(problem, case.inputs)
        except (InvalidProblem, TypeError) as error:
            raise CaseFormatError(str(error)) from error
        return case

    def save(self, path: str | os.PathLike[str]) -> str:
        """Write its file, whole or not at all.

        Returns:
            The SHA-256 of the file: the case's id.
        """
        data = self.to_bytes()
        target = Path(path)
        unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
        try:
            unfinished.write_bytes(data)
            unfinished.replace(target)
        finally:
            unfinished.unlink(missing_ok=True)
        return hashlib.sha256(data).hexdigest()

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Case:
        """Read a case's file. Nothing in it is executed.

        Raises:
            CaseFormatError: the file is damaged, contradicts itself, or is of another format version.
            OSError: it cannot be opened.
        """
        try:
            return Case.from_bytes(container.read_file(path))
        except CaseFormatError as error:
            raise CaseFormatError(f"{os.fspath(path)}: {error}") from error


def _check_lengths(problem: Problem, inputs: Inputs) -> None:
    """cu_seqlens say something; where slots overlap the result is unspecified, so there is nothing to verify."""
    if problem.spec.lengths == "cu_seqlens":
        lengths = {name: tensor for name, tensor in inputs.items() if name.startswith("cu_seqlens")}
        given = TensorArguments(inputs.q, inputs.k, **lengths)
        check_contents(Options(qkv_format=problem.layout), given, (None, None))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _encode_view(view: storage.View) -> dict[str, Any]:
    return {
        "base": view.base,
        "size": list(view.size),
        "stride": list(view.stride),
        "offset": view.offset,
    }


def _document(text: str) -> dict[str, Any]:
    """The decoded document; format and top level are checked."""
    found = container.parse(text, "the case document")
    if not isinstance(found, dict):
        raise CaseFormatError(f"the case document is a {type(found).__name__}, expected an object")
    if found.get("format") != _FORMAT or type(found["format"]) is not int:
        raise CaseFormatError(f"format is {found.get('format')!r}, this release reads {_FORMAT}")
    if set(found) != _DOCUMENT:
        raise CaseFormatError(
            f"the case document has {sorted(found)}, expected {sorted(_DOCUMENT)}"
        )
    for name, kind in (("problem", dict), ("views", dict), ("provenance", dict), ("history", list)):
        if not isinstance(found[name], kind):
            raise CaseFormatError(
                f"{name} is a {type(found[name]).__name__}, expected a {kind.__name__}"
            )
    return found


def _decode_views(found: Mapping[str, Any]) -> dict[str, storage.View]:
    unknown = sorted(set(found) - set(_TENSORS))
    missing = [name for name in ("q", "k", "v", "dout") if name not in found]
    if unknown or missing:
        raise CaseFormatError(f"views has unknown tensors {unknown} and lacks {missing}")
    return {name: _decode_view(name, found[name]) for name in _TENSORS if name in found}


def _decode_view(name: str, found: Any) -> storage.View:
    if not isinstance(found, dict) or set(found) != {"base", "size", "stride", "offset"}:
        raise CaseFormatError(
            f"the view of {name} is not an object of base, size, stride and offset"
        )
    base, offset = found["base"], found["offset"]
    size, stride = found["size"], found["stride"]
    ints = all(isinstance(v, list) and all(type(n) is int for n in v) for v in (size, stride))
    if not ints or type(offset) is not int or not isinstance(base, str):
        raise CaseFormatError(f"the view of {name} is not made of a text, lists of ints and an int")
    return storage.View(base, tuple(size), tuple(stride), offset)


def _parts(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """inputs, dout and dlse of tensors by name."""
    given: dict[str, Any] = {name: tensors[name] for name in _INPUTS if name in tensors}
    return {"inputs": Inputs(**given), "dout": tensors["dout"], "dlse": tensors.get("dlse")}
