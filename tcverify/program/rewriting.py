"""Individual rewrites: a pass asks permission before each of them; some are refused while the faulty one is searched for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx


class RewriteRequest(NamedTuple):
    """A rewrite for which a pass asked permission on one rank.

    Attributes:
        pattern: its name in the pass.
        node: the name of its first node, or "".
        again: how often the pass had asked for the same before on this rank.
    """

    pattern: str
    node: str = ""
    again: int = 0


@dataclass(slots=True)
class _Counting:
    """A call of a pass whose rewrites are counted.

    Attributes:
        allowed: the allowed rewrites; None means all.
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
        node: its first node.

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
    """Count the rewrites of one call of a pass, and refuse those that are not allowed. Yields the requested ones, in order."""
    counting = _Counting(allowed)
    token = _COUNTING.set(counting)
    try:
        yield counting.asked
    finally:
        _COUNTING.reset(token)


def decode_rewrite_requests(rows: Any) -> list[list[RewriteRequest]]:
    """Read the requested rewrites of ranks from JSON. Raises `TypeError` or `ValueError` for malformed data."""
    return [[RewriteRequest(str(pattern), str(node), int(again)) for pattern, node, again in row] for row in rows]


#: For each rank, the rewrites that a pass may make; None means all of them.
Allowed = Sequence[Set[RewriteRequest]] | None

__all__ = ["Allowed", "RewriteRequest", "count_rewrites", "decode_rewrite_requests", "rewrite"]
