"""How much tests try: a part in every run, all of it every night (TCVERIFY_TESTS=night, as `tox -e nightly` sets it)."""

from __future__ import annotations

import os

NIGHT = os.environ.get("TCVERIFY_TESTS") == "night"


def by_night(full: int, otherwise: int) -> int:
    """Return `full` at night: how many examples, or nodes; `otherwise` in every other run."""
    return full if NIGHT else otherwise
