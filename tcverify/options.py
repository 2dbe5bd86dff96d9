"""Options of a run: one set, passed from the command line or pytest to campaigns and to the workers' slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tcverify.registry.choices import DomainName


@dataclass(frozen=True, kw_only=True)
class Options:
    """How programs are verified, and when to stop.

    Attributes:
        max_examples, max_time: bounds, in programs and in seconds; at least one is set.
        seed: of the program generator.
        checks: names of the checks to apply; None means all.
        domain: the number domain in which values are compared: "float64", "native" or "exact"; see `verify`.
        shrink_time: seconds after which shrinking of a finding starts no new trial; a trial that hangs still runs until
            its timeout.
        fail_fast: stop at the first finding that is not known.
        deep: verify every program deeply (see `verify`), instead of some.
        earlier: try programs that failed in earlier runs first, and remember those that fail in this one.
    """

    max_examples: int | None = 200
    max_time: float | None = None
    seed: int = 0
    checks: Sequence[str] | None = None
    domain: DomainName = "float64"
    shrink_time: float = 30.0
    fail_fast: bool = False
    deep: bool = False
    earlier: bool = True

    def shared(self, **changed: Any) -> dict[str, Any]:
        """Return these options as keyword arguments, with some changed or added."""
        return {one.name: getattr(self, one.name) for one in fields(Options)} | changed


__all__ = ["Options"]
