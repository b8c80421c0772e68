"""Entry: a function through which programs call attention, and how its arguments are understood."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from inspect import BoundArguments, Parameter, Signature, signature
from typing import Any

import torch
from torch import Tensor

from gradtruth.errors import InvalidProblem
from gradtruth.verify.interception.call import Translation

__all__ = ["Entry", "Target", "autocast", "bound", "loaded", "only", "rerun"]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a function is: an attribute of a module or class, or an entry of a dict.

    Attributes:
        owner, name: of the attribute or entry.
        shared: other modules may hold the function too (``from ... import``).
    """

    owner: Any
    name: str
    shared: bool = True

    def get(self) -> Callable[..., Any]:
        """The function."""
        space = self.owner if isinstance(self.owner, dict) else vars(self.owner)
        return space[self.name]


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry point.

    Attributes:
        name: in reports.
        targets: where it is now; nothing where its library is not loaded. Imports nothing.
        translate: (the function, args, kwargs of a call) -> what the call means. Raises TypeError, ValueError or
            NotImplementedError, with a reason, for a call that cannot be said as a Problem.
    """

    name: str
    targets: Callable[[], Iterable[Target]]
    translate: Callable[[Callable[..., Any], tuple, dict[str, Any]], Translation]


def loaded(module: str, name: str, *, shared: bool = True) -> list[Target]:
    """The function of this name in a module, if that is loaded and has one."""
    found = sys.modules.get(module)
    if found is None or not callable(vars(found).get(name)):
        return []
    return [Target(found, name, shared)]


def bound(
    of: Callable[..., Any] | Signature, args: tuple, kwargs: dict[str, Any]
) -> BoundArguments:
    """The arguments of a call by name, defaults filled in, **kwargs among them."""
    found = (of if isinstance(of, Signature) else signature(of)).bind(*args, **kwargs)
    found.apply_defaults()
    return found


def rerun(
    original: Callable[..., Any], arguments: BoundArguments
) -> Callable[[Mapping[str, Tensor]], Any]:
    """Makes the call again with other tensors for some of its arguments."""
    kinds = {p.name: p.kind for p in arguments.signature.parameters.values()}

    def run(given: Mapping[str, Tensor]) -> Any:
        for name, tensor in given.items():
            if kinds.get(name) in (Parameter.VAR_KEYWORD, None):
                raise InvalidProblem(f"{name} is not an argument of its own")
            arguments.arguments[name] = tensor
        return original(*arguments.args, **arguments.kwargs)

    return run


def only(arguments: Mapping[str, Any], known: Iterable[str], plain: Mapping[str, tuple]) -> None:
    """Refuse what is not understood.

    Args:
        arguments: of a call, by name.
        known: names that were read, or that change nothing.
        plain: names to the values that mean nothing; others are refused.

    Raises:
        NotImplementedError: names the argument and its value.
    """
    for name, value in arguments.items():
        if name in known:
            continue
        if not any(value is one or _same(value, one) for one in (None, *plain.get(name, ()))):
            shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else f"{value!r:.80}"
            raise NotImplementedError(f"{name} is {shown}, which is not understood")


def _same(value: object, one: object) -> bool:
    return type(value) is type(one) and not isinstance(value, Tensor) and value == one


def autocast(*tensors: Tensor | None) -> tuple[Any, ...]:
    """What autocast makes of the float tensors of an operation that it runs in low precision."""
    given = next(x for x in tensors if x is not None)
    kind = given.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    plain = (torch.float64, dtype)
    return tuple(
        x if x is None or not x.is_floating_point() or x.dtype in plain else x.to(dtype)
        for x in tensors
    )
