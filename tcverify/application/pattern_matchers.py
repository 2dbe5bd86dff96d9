"""Controls PyTorch's pattern matchers match by match, so that passes made of patterns can be bisected without changes.

Follows `PatternEntry.apply` of `torch/_inductor/pattern_matcher.py`, and `SubgraphMatcher.match` of
`torch/fx/passes/utils/matcher_utils.py`, which is behind `torch.fx.replace_pattern`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import fx

from tcverify.program import rewrite


@contextlib.contextmanager
def ask_before_matches() -> Iterator[None]:
    """Make the imported pattern matchers ask permission for every match (see `tcverify.rewrite`) inside the block."""
    with contextlib.ExitStack() as stack:
        entry = getattr(sys.modules.get("torch._inductor.pattern_matcher"), "PatternEntry", None)
        for kind in _subclasses(entry) if entry is not None else ():
            if "apply" in vars(kind):
                stack.enter_context(_replaced(kind, "apply", _entry_asking))
        matcher = getattr(sys.modules.get("torch.fx.passes.utils.matcher_utils"), "SubgraphMatcher", None)
        if matcher is not None:
            stack.enter_context(_replaced(matcher, "match", _matches_asking))
        yield


@contextlib.contextmanager
def _replaced(kind: type, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap a method inside the block."""
    before = getattr(kind, name)
    setattr(kind, name, wrap(before))
    try:
        yield
    finally:
        setattr(kind, name, before)


def _subclasses(kind: Any) -> Iterator[Any]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _entry_asking(apply: Callable[..., Any]) -> Callable[..., Any]:
    """`PatternEntry.apply`, which rewrites one match or skips it."""

    @functools.wraps(apply)
    def asking(entry: Any, match: Any, graph: fx.Graph, node: fx.Node) -> Any:
        return apply(entry, match, graph, node) if rewrite(_pattern_name(entry), node) else None

    return asking


def _pattern_name(entry: Any) -> str:
    """A readable name for the pattern of an entry: its own, or that of the function that rewrites a match."""
    named = getattr(entry, "pattern_name", None)
    if isinstance(named, str) and named:
        return named
    handler = getattr(entry, "handler", None)
    return str(getattr(handler, "__name__", None) or type(getattr(entry, "pattern", entry)).__name__)


def _matches_asking(match: Callable[..., Any]) -> Callable[..., Any]:
    """`SubgraphMatcher.match`, without the matches that may not be rewritten."""

    @functools.wraps(match)
    def asking(matcher: Any, *args: Any, **kwargs: Any) -> list[Any]:
        found = match(matcher, *args, **kwargs)
        return [one for one in found if rewrite("replace_pattern", next(iter(one.anchors), None))]

    return asking


__all__ = ["ask_before_matches"]
