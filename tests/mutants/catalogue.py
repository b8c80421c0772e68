"""The catalogue: every mutant with what must find it. Importing the rooms fills it."""

from __future__ import annotations

from dataclasses import dataclass

CATALOGUE: dict[str, Mutant] = {}


@dataclass(frozen=True)
class Mutant:
    """A kernel with one fault.

    Attributes:
        name: of its class.
        make: the kernel.
        kind: of fault, K01 to K29.
        item: problem of the doctor's programme that shows it.
        check: the check that must find it.
        tensor: in which tensor; None where the check names none.
        finding: the kind of finding.
    """

    name: str
    make: type
    kind: str
    item: str
    check: str
    tensor: str | None
    finding: str

    @property
    def fault(self):
        """In words."""
        return " ".join(self.make.__doc__.split())


def mutant(kind, item, check, tensor, finding="value"):
    """Enter a kernel into the catalogue."""

    def enter(make):
        name = make.__name__
        if name in CATALOGUE:
            raise ValueError(f"two mutants are named {name}")
        CATALOGUE[name] = Mutant(name, make, kind, item, check, tensor, finding)
        return make

    return enter
