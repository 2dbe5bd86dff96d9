"""Options of a run: one set, on its way from the command line or pytest to campaigns and to the slices of workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from tcverify.registry.choices import DomainName


@dataclass(frozen=True, kw_only=True)
class Options:
    """How programs are verified, and when that ends.

    Attributes:
        max_examples, max_time: bounds, in programs and in seconds; at least one is set.
        seed: of the drawing.
        checks: names of those to apply; None: all.
        domain: the number domain that values are judged in: "float64", "native" or "exact"; see `verify`.
        shrink_time: seconds after which no new trial of shrinking one finding begins; a trial that hangs then still takes
            its time-out.
        fail_fast: stop at the first finding that is not known.
        deep: apply the pass deeply (see `verify`) to every program, not to some.
        earlier: try what failed in earlier runs first, and remember what fails in this one.
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
        """Return these options as keyword arguments for what is made of them, some of them changed or added to."""
        return {one.name: getattr(self, one.name) for one in fields(Options)} | changed


__all__ = ["Options"]
