"""Why an item of the plugin fails, as exceptions. They are shown without a traceback."""

from __future__ import annotations

from typing import Any

from tcverify.verification import exceptions as refuted
from tcverify.verification.exceptions import Failure, Refuted, refuted_by


class NothingTested(Failure):
    """No program passed, or the pass changed none."""


class Inconclusive(Failure):
    """Too many programs are inconclusive."""


class NotVerified(Failure):
    """The campaign could not run: the pass cannot be loaded, the process group does not start."""


def __getattr__(name: str) -> Any:
    """The classes by kind of finding, such as `WrongValue`."""
    return getattr(refuted, name)


__all__ = ["Failure", "Inconclusive", "NotVerified", "NothingTested", "Refuted", "refuted_by"]
