"""The identity through which the operands of a call go, so that the gradients of this call alone are seen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradtruth.verify.interception.call import Listener, Translation

__all__ = ["listen"]


class _Identity(torch.autograd.Function):
    """x -> x for several tensors. Its backward runs once, when the gradients of all of them are there.

    It saves no tensor, so activation checkpointing counts the same tensors with and without it.
    """

    @staticmethod
    def forward(ctx: Any, tell: Callable[..., None], *operands: Tensor) -> tuple[Tensor, ...]:
        ctx.tell = tell
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for x in operands)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.tell(*grads)
        return (None, *grads)


class _Upstream:
    """dout and dlse of the backward that is under way, as they came."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def hook(self, name: str, tensor: Tensor | None, then: Callable[[], None] | None) -> None:
        """Keep what the gradient of a tensor is. A hook, not an identity: out may be written to in place."""
        if tensor is None or not tensor.requires_grad:
            return

        def keep(gradient: Tensor | None) -> None:
            # None where only another output of the same call got a gradient.
            if gradient is not None:
                self.found[name] = gradient.detach()
            if then is not None:
                then()

        tensor.register_hook(keep)

    def take(self) -> dict[str, Tensor]:
        """What was kept, once."""
        found, self.found = self.found, {}
        return found


def listen(translation: Translation, listener: Listener) -> Any:
    """Make the call, and tell the listener about it."""
    upstream = _Upstream()
    operands = dict(translation.operands)

    def tell(grads: Mapping[str, Tensor | None]) -> None:
        given = {name: None if x is None else x.detach() for name, x in grads.items()}
        found = upstream.take()
        dout, dlse = found.get("out"), found.get("lse")
        listener.backward(
            None if dout is None else translation.out(dout),
            None if dlse is None else translation.lse(dlse),
            translation.gradients(given),
        )

    names = [name for name, x in operands.items() if x.requires_grad]
    tapped = listener.wants_gradients and torch.is_grad_enabled() and bool(names)
    if tapped:
        through = _Identity.apply(
            lambda *grads: tell(dict(zip(names, grads, strict=True))),
            *(operands[name] for name in names),
        )
        operands |= dict(zip(names, through, strict=True))  # type: ignore[arg-type]
    result = translation.run(operands)
    out, lse = translation.outputs(result)
    listener.forward(
        translation.out(out.detach()), None if lse is None else translation.lse(lse.detach())
    )
    upstream.hook("lse", lse, None)
    upstream.hook("out", out, None if tapped else lambda: tell({}))
    return result
