"""Rewrites one by one: a pass asks before each of them, and is told to leave some out while the one to blame is searched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx


class RewriteRequest(NamedTuple):
    """A rewrite that a pass has asked for on one rank.

    Attributes:
        pattern: what the pass calls it.
        node: where, by name, or "".
        again: how often the pass had asked the same on this rank before.
    """

    pattern: str
    node: str = ""
    again: int = 0


@dataclass(slots=True)
class _Counting:
    """A call of a pass whose rewrites are counted.

    Attributes:
        allowed: what it may do; None is everything.
    """

    allowed: Set[RewriteRequest] | None
    asked: list[RewriteRequest] = field(default_factory=list)
    times: Counter[tuple[str, str]] = field(default_factory=Counter)


_COUNTING: ContextVar[_Counting | None] = ContextVar("rewrites that are counted", default=None)


def rewrite(pattern: str, node: fx.Node | str | None = None) -> bool:
    """Return whether a pass may apply its next rewrite: always true, except while `--bisect` searches for the faulty one.

    A pass that calls this before each rewrite, and skips the refused ones, is bisected by its own rewrites.

    Args:
        pattern: the name of the rewrite, e.g. "fuse-norm".
        node: the node that it begins at.

    Example:
        >>> for node in gm.graph.nodes:
        ...     if matches(node) and tcverify.rewrite("fuse-norm", node):
        ...         fuse(node)
    """
    counting = _COUNTING.get()
    if counting is None:
        return True
    where = node.name if isinstance(node, fx.Node) else str(node or "")
    same = str(pattern), where
    ask = RewriteRequest(*same, counting.times[same])
    counting.times[same] += 1
    counting.asked.append(ask)
    return counting.allowed is None or ask in counting.allowed


@contextmanager
def count_rewrites(allowed: Set[RewriteRequest] | None) -> Iterator[list[RewriteRequest]]:
    """Count the rewrites of one call of a pass, and refuse those that are not allowed. Yields those asked for, in order."""
    counting = _Counting(allowed)
    token = _COUNTING.set(counting)
    try:
        yield counting.asked
    finally:
        _COUNTING.reset(token)


def decode_rewrite_requests(rows: Any) -> list[list[RewriteRequest]]:
    """Read what ranks ask for from JSON. Raises `TypeError` or `ValueError` where it is no such thing."""
    return [[RewriteRequest(str(pattern), str(node), int(again)) for pattern, node, again in row] for row in rows]


#: For each rank, the rewrites that a pass may make; None is all of them.
Allowed = Sequence[Set[RewriteRequest]] | None

__all__ = ["Allowed", "RewriteRequest", "count_rewrites", "decode_rewrite_requests", "rewrite"]
