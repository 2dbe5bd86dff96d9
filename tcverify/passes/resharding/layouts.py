"""Reads layouts off a graph: how values lie, and which ops change that."""

from __future__ import annotations

from torch import fx

from tcverify.errors import ProgramError, Unsupported
from tcverify.ops import Layout, Resharding
from tcverify.ops.dialects.multidevice import REDUCE, SET
from tcverify.passes.editing import named_arguments, op_name


def resharding_of(node: fx.Node) -> Resharding | None:
    """What a `set` or `reduce` asks for; None for other nodes.

    Raises:
        Unsupported: its arguments do not fit together.
    """
    if op_name(node) not in (SET, REDUCE):
        return None
    given = named_arguments(node)
    try:
        source, target = Layout.parse(given["source"]), Layout.parse(given["target"])
        return Resharding(source, target, tuple(given["shape"]), given.get("dim"), given.get("reduce_op"))
    except ProgramError as error:
        raise Unsupported(f"'{node.name}': {error.message}", error.hint) from None


def layout_of(node: fx.Node) -> Layout | None:
    """The layout of a node's value; None if unknown.

    Raises:
        Unsupported: the metadata is not a layout.
    """
    made = resharding_of(node)
    if made is not None:
        return made.target
    text = node.meta.get("layout")
    if text is None:
        return None
    try:
        return Layout.parse(text)
    except ProgramError as error:
        raise Unsupported(f"the layout of '{node.name}': {error.message}", error.hint) from None


def stream_axis_of(node: fx.Node) -> int | None:
    """The dim of a result whose parts may be computed on separate streams, or None."""
    axis = node.meta.get("stream_axis")
    return axis if type(axis) is int else None


__all__ = ["layout_of", "resharding_of", "stream_axis_of"]
