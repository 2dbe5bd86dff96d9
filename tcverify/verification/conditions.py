"""Whether a rewrite is right only if inputs of which nothing is known are equal on the ranks.

Such inputs are drawn different on every rank, which no rewrite may rely on being otherwise. Where a finding is gone once they
are equal, it says nothing against the pass until somebody says how they lie: it becomes a condition, which names few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic

from tcverify.program import Doubt, Program

#: Seconds and runs that finding few inputs may take.
_SECONDS, _RUNS = 60.0, 48

#: An input and a mesh dim.
Unknown = tuple[str, str]


def condition(program: Program, holds: Callable[[Collection[Unknown]], bool]) -> Doubt:
    """Say which inputs have to be equal on the ranks of which mesh dims.

    Args:
        holds: whether the rewrite is right where these are equal and the other unknown ones different. It is where all are.
    """
    pairs = program.unknown
    search = _Search(holds)
    dims = list(dict.fromkeys(dim for _, dim in pairs))
    for dim in dims if len(dims) > 1 else ():
        only = [pair for pair in pairs if pair[1] == dim]
        if search.holds(only):
            pairs = only
            break
    by_dim: dict[str, list[str]] = {}
    for name, dim in search.few(list(pairs)):
        by_dim.setdefault(dim, []).append(name)
    told = " and ".join(f"{_listed(names)} equal on all ranks of {dim}" for dim, names in by_dim.items())
    name, dim = next((names[0], dim) for dim, names in by_dim.items())
    return Doubt(
        "placement-needed",
        f"right only if {told}; if so, use --placement {name}={dim}:replicated, else give its placement",
    )


class _Search:
    """Looks for few inputs, as long as there is time."""

    def __init__(self, holds: Callable[[Collection[Unknown]], bool]) -> None:
        self._holds, self._runs, self._until = holds, 0, monotonic() + _SECONDS

    def holds(self, pairs: Collection[Unknown]) -> bool:
        self._runs += 1
        return self._holds(pairs)

    def few(self, pairs: list[Unknown]) -> list[Unknown]:
        """Leave out parts, halves first, as long as the rest is enough."""
        size = -(-len(pairs) // 2)
        while len(pairs) > 1:
            start = 0
            while start < len(pairs):
                if self._runs >= _RUNS or monotonic() > self._until:
                    return pairs
                rest = pairs[:start] + pairs[start + size :]
                if rest and self.holds(rest):
                    pairs = rest
                else:
                    start += size
            if size == 1:
                break
            size = -(-size // 2)
        return pairs


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"{', '.join(names[:6])}{more} {'is' if len(names) == 1 else 'are'}"


__all__ = ["Unknown", "condition"]
