"""How much tests try: a part in every run, all of it every night (TCVERIFY_TESTS=night, as `tox -e nightly` sets it)."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")

NIGHT = os.environ.get("TCVERIFY_TESTS") == "night"


def by_night(full: T, otherwise: T) -> T:
    """Return `full` at night: how many examples, or nodes; `otherwise` in every other run."""
    return full if NIGHT else otherwise


def crossed(many: Iterable[S], few: Sequence[T]) -> list[tuple[S, T]]:
    """Return all pairs at night; in every other run each of `many` once, with one of `few` in turn."""
    many = list(many)
    return by_night(list(itertools.product(many, few)), list(zip(many, itertools.cycle(few), strict=False)))
