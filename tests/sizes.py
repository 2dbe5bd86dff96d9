"""How much tests try: a part in every run, all of it every night (TCVERIFY_TESTS=night, as `tox -e nightly` sets it)."""

from __future__ import annotations

import os
from typing import TypeVar

T = TypeVar("T")

NIGHT = os.environ.get("TCVERIFY_TESTS") == "night"


def by_night(full: T, otherwise: T) -> T:
    """Return `full` at night: how many examples, or nodes; `otherwise` in every other run."""
    return full if NIGHT else otherwise
