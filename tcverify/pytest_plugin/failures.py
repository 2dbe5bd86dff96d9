"""Why an item of the plugin fails, as exceptions: one class per kind of finding. They are shown without a traceback."""

from __future__ import annotations

from functools import cache
from typing import Any


class Failure(AssertionError):
    """An item failed. `str` gives the whole text, without colour.

    Attributes:
        headline: the cause in one line, for lists of failures.
    """

    def __init__(self, headline: str, text: str) -> None:
        super().__init__(text)
        self.headline = headline


class Refuted(Failure):
    """The campaign refuted the pass. What is raised is of a subclass, one per kind of finding: `WrongValue`, `Deadlock`, …

    `tcverify.pytest_plugin.failures` has the subclasses by name, for `pytest.mark.xfail(raises=WrongValue)`.
    """

    kind: str


class NothingTested(Failure):
    """No program passed, or the pass changed none."""


class NotVerified(Failure):
    """The campaign could not run: the pass cannot be loaded, the process group does not start."""


@cache
def refuted_by(kind: str) -> type[Refuted]:
    """Return the class of failures by this kind of finding."""
    return type(_class_name(kind), (Refuted,), {"__module__": __name__, "kind": kind})


def _class_name(kind: str) -> str:
    return "".join(part.capitalize() for part in kind.split("-"))


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):  # Python itself asks for "__path__", where torch is not to be imported
        from tcverify.program.finding import KINDS

        for kind in KINDS:
            if name == _class_name(kind):
                return refuted_by(kind)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
