"""Whether a rewrite is correct only if inputs with unknown placement are equal on the ranks.

Such inputs are drawn differently on every rank, since no rewrite may assume that they are equal. A finding that disappears once
they are equal says nothing against the pass until the user states their placement. It becomes a condition, which names as few of
them as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from time import monotonic

from tcverify.program import Doubt, Program

#: Limits of the search for few inputs, in seconds and in runs.
_SECONDS, _RUNS = 60.0, 48

#: An input and a mesh dim.
Unknown = tuple[str, str]


def condition(program: Program, holds: Callable[[Collection[Unknown]], bool]) -> Doubt:
    """Say which inputs have to be equal on the ranks of which mesh dims.

    Args:
        holds: whether the rewrite is correct if these are equal and the other unknown inputs differ. It is if all are equal.
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
    """Search for few inputs, within the time limit."""

    def __init__(self, holds: Callable[[Collection[Unknown]], bool]) -> None:
        self._holds, self._runs, self._until = holds, 0, monotonic() + _SECONDS

    def holds(self, pairs: Collection[Unknown]) -> bool:
        self._runs += 1
        return self._holds(pairs)

    def few(self, pairs: list[Unknown]) -> list[Unknown]:
        """Remove parts, halves first, as long as the rest suffices."""
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
