"""Says what a call produces: the shape, stride and dtype of its results, and the storages that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tcverify.ops.shapes import NO_GROUPS, infer_result
from tcverify.ops.table import lookup


def infer(
    target: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    fresh: Callable[[], int],
    groups: Mapping[str, Sequence[int]] = NO_GROUPS,
) -> Any:
    """Return what `target` produces, an op of the tables; see `tcverify.ops.shapes.infer_result`."""
    return infer_result(lookup(target), target, args, kwargs, fresh, groups)


__all__ = ["infer"]
