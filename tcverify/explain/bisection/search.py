"""The search for a smallest selection that still shows something: bisection over prefixes, then delta debugging.

Follows LLVM's `-opt-bisect-limit` for the first part and Zeller and Hildebrandt, "Simplifying and isolating failure-inducing
input" (2002), for the second.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set


def smallest_showing_prefix(total: int, shows: Callable[[Set[int]], bool]) -> int:
    """Return a number k so that the first k show it and the first k - 1 do not. Needs log2(total) trials.

    Args:
        total: how many there are, numbered from 1; all together show it, none do not.
    """
    low, high = 0, total
    while high - low > 1:
        middle = (low + high) // 2
        if shows(frozenset(range(1, middle + 1))):
            high = middle
        else:
            low = middle
    return high


def minimise_subset(numbers: Sequence[int], shows: Callable[[Set[int]], bool]) -> list[int]:
    """Return a part of `numbers` that shows it, where leaving out any one of them does not.

    Args:
        numbers: these together show it.
    """
    kept = list(numbers)
    step = max(1, len(kept) // 2)
    while True:
        shorter = False
        for start in range(0, len(kept), step):
            left = kept[:start] + kept[start + step :]
            if len(left) < len(kept) and left and shows(frozenset(left)):
                kept, shorter = left, True
                break
        if shorter:
            step = max(1, min(step, len(kept) // 2))
        elif step == 1:
            return kept
        else:
            step = max(1, step // 2)


__all__ = ["minimise_subset", "smallest_showing_prefix"]
