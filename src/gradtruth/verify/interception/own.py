"""Our own calls, functional and module, exactly as the operator gets them; and functions of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import unwrap
from typing import Any

from torch import Tensor

import gradtruth.calls
from gradtruth.arguments import Options, TensorArguments
from gradtruth.backends.peers.located import located
from gradtruth.core.layout import split_packed
from gradtruth.core.problem import Problem
from gradtruth.core.spec import Spec
from gradtruth.core.tensors import Inputs
from gradtruth.errors import InvalidProblem
from gradtruth.verify.interception.call import Meaning, Translation, meaning_of
from gradtruth.verify.interception.entry import Entry, Target, rerun
from gradtruth.verify.interception.entry import bound as bind

__all__ = ["OWN", "function"]

_FIELDS = tuple(Inputs.__dataclass_fields__)
_GRADIENTS = {"q": "dq", "k": "dk", "v": "dv", "bias": "dbias", "softmax_offset": "dsoftmax_offset"}


def _translate(original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Translation:
    plan, options, tensors = bind(original, args, kwargs).args
    max_q, max_kv, text, _ = options
    spec = Spec.decode(text)
    detached: list[Any] = [x if x is None else x.detach() for x in tensors]
    q, k, v, *rest = detached
    inputs = Inputs(*split_packed(spec.packing, q, k, v), *rest)
    problem = Problem.of(spec, inputs, max_q, max_kv)
    operands = {
        name: x
        for name, x in zip(_FIELDS, tensors, strict=True)
        if name in _GRADIENTS and x is not None
    }

    def run(given: Mapping[str, Tensor]) -> Any:
        replaced = tuple(given.get(name, x) for name, x in zip(_FIELDS, tensors, strict=True))
        return original(plan, options, replaced)

    def gradients(found: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
        named = {_GRADIENTS[name]: x for name, x in found.items() if x is not None}
        return _unpacked(spec, named)

    return Translation(
        meaning=Meaning(problem, inputs, known_dropout=True),
        operands=operands,
        run=run,
        gradients=gradients,
        outputs=lambda result: result[:2],
    )


def _unpacked(spec: Spec, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of q, k and v from those of a packed buffer, which travels in the place of its first."""
    if spec.packing in ("3hd", "h3d") and "dq" in found:
        parts = split_packed(spec.packing, found["dq"], None, None)
        return found | dict(zip(("dq", "dk", "dv"), parts, strict=True))
    if spec.packing in ("2hd", "h2d") and "dk" in found:
        buffer = found["dk"]
        _, dk, dv = split_packed(spec.packing, buffer, buffer, None)
        return found | {"dk": dk, "dv": dv}
    return found


OWN = Entry("gradtruth.attention", lambda: [Target(gradtruth.calls, "attend")], _translate)


# ---------------------------------------------------------------- any function, in the same words

_WORDS = {"query": "q", "key": "k", "value": "v"} | {
    name: name for name in ("bias", "softmax_offset")
}


def function(text: str) -> Entry:
    """The entry point "module:function" (or "file.py:function"), called in the words of ``gradtruth.attention``.

    Raises:
        InvalidProblem: there is no such function.
    """
    found = located(text, "function")
    if not callable(found) or isinstance(found, type):
        raise InvalidProblem(
            f"function is {text!r}, expected a function, not a {type(found).__name__}"
        )
    if not _targets(found):
        raise InvalidProblem(
            f"function is {text!r}, expected one that its module holds under a name"
        )
    return Entry(text, lambda: _targets(found), _translate_words)


def _targets(found: Any) -> list[Target]:
    """Where the function's own module has it; nowhere once it is replaced."""
    # A dict of its own stands for the module, which may be known under two names (__main__).
    space = getattr(unwrap(found), "__globals__", {})
    return [Target(space, name) for name, value in list(space.items()) if value is found][:1]


def _translate_words(
    original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Translation:
    arguments = bind(original, args, kwargs)
    given = dict(arguments.arguments)
    for name, value in list(given.items()):
        if isinstance(value, dict) and name not in _known():
            given |= given.pop(name)
    names = list(given)
    for old, new in zip(names[:3], ("query", "key", "value"), strict=False):
        given[new] = given.pop(old)
    unknown = {n: x for n, x in given.items() if n not in _known() and x is not None}
    if unknown:
        raise NotImplementedError(f"{sorted(unknown)} are no words of gradtruth.attention")
    tensors = TensorArguments(**{n: given[n] for n in TensorArguments._fields if n in given})
    options = Options(**{n: given[n] for n in Options._fields if n in given})
    seeded = tensors.dropout_seed is not None
    operands = {n: given[n] for n in _WORDS if isinstance(given.get(n), Tensor)}
    by_name: dict[str, str] = dict(zip(("query", "key", "value"), names, strict=False))
    again = rerun(original, arguments)
    return Translation(
        meaning=meaning_of(tensors, options, known_dropout=seeded),
        operands=operands,
        run=lambda found: again({by_name.get(n, n): x for n, x in found.items()}),
        gradients=lambda found: {
            _GRADIENTS[_WORDS[n]]: x for n, x in found.items() if x is not None
        },
        outputs=lambda result: (
            (result[0], result[1]) if isinstance(result, tuple | list) else (result, None)
        ),
    )


def _known() -> frozenset[str]:
    return frozenset((*TensorArguments._fields, *Options._fields))
