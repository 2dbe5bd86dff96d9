"""Failures as exceptions, for callers who want them: one class per kind of finding. `str` gives the whole text without colour."""

from __future__ import annotations

from functools import cache
from typing import Any


class Failure(AssertionError):
    """Something failed. `str` gives the whole text, without colour.

    Attributes:
        headline: the cause in one line, for lists of failures.
    """

    def __init__(self, headline: str, text: str) -> None:
        super().__init__(text)
        self.headline = headline


class Refuted(Failure):
    """Raised if a pass is refuted, as a subclass per kind of finding: `WrongValue`, `Deadlock`, …

    `tcverify.verification.exceptions` has the subclasses by name, for `pytest.mark.xfail(raises=WrongValue)`.
    """

    kind: str


@cache
def refuted_by(kind: str) -> type[Refuted]:
    """Return the class for this kind of finding."""
    return type(_class_name(kind), (Refuted,), {"__module__": __name__, "kind": kind})


def _class_name(kind: str) -> str:
    return "".join(part.capitalize() for part in kind.split("-"))


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):  # Python itself looks up "__path__", which must not import torch
        from tcverify.program.finding import KINDS

        for kind in KINDS:
            if name == _class_name(kind):
                return refuted_by(kind)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
