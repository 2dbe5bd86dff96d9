"""P5: attention that every rank computes in full, and whose projection meets a residual that is local, is sliced in front of it.

    attention → [views] → product with a replicated matrix [+ bias] → [views, markers] → sum with a local residual

The product is then computed of this rank's tokens alone, and the residual is not gathered. The slice is that at the rank's
position in the group over which the residual is divided. Attention and matrix must be the same on all its members; a
projection that someone else reads on all tokens stays as it is.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from tcverify.passes.editing import known_spec, named_arguments, op_name
from tcverify.passes.placements import Placements
from tcverify.passes.sequence_parallel.experts import PRODUCTS
from tcverify.passes.sequence_parallel.layout import (
    ADD,
    ADDENDS,
    MARKERS,
    VIEWS,
    Move,
    Shard,
    Stage,
    is_contiguous,
    shape_of,
    token_dim,
)
from tcverify.passes.sequence_parallel.moves import Guards, MovePlan

#: The stage of a projection of which this rank computes its tokens, and of its bias, views and markers.
PROJECTED: Stage = "projected"
_ATTENTION = frozenset({"tensor_cast::attention"})
#: What may stand between attention and its projection.
_TURNS = VIEWS | {"aten::transpose.int", "aten::permute", "aten::clone", "aten::_to_copy"}
#: Stages of residuals that are local.
_RESIDUALS: tuple[Stage, ...] = ("residual", "added", "experts")


class AttentionGuards:
    """What the pass asks before it slices attention."""

    def projection_allows(self, operand: Any, weights: list[Any], shard: Shard, facts: Placements) -> bool:
        """Whether attention and the matrix (and bias) of its projection are the same on all members."""
        return all(isinstance(value, fx.Node) and facts.replicated(value, shard.group) for value in (operand, *weights))

    def meets(self, residual: Move) -> bool:
        """Whether a residual is local, so that a projection that is added to it need not have all tokens."""
        return residual.stage in _RESIDUALS and type(residual.shard) is Shard


def move_projection(node: fx.Node, op: str, plan: MovePlan, facts: Placements, guards: Guards) -> Move | None:
    """Let the projection behind attention move that the sum `node` adds to a local residual, and return the move of the addend.

    None if there is no such projection, or it cannot move.
    """
    given = named_arguments(node)
    names = ADDENDS[op]
    if "P5" not in guards.patterns or len(names) != 2:
        return None
    for name, slot in (names, names[::-1]):
        residual = plan.moves.get(given[slot]) if isinstance(given[slot], fx.Node) else None
        addend = given[name]
        if residual is None or not isinstance(addend, fx.Node) or addend in plan.moves or not guards.meets(residual):
            continue
        found = _chain(addend, residual, plan, facts, guards)
        if found is not None:
            plan.moves |= {move.node: move for move in found}
            return found[-1]
    return None


def _chain(addend: fx.Node, residual: Move, plan: MovePlan, facts: Placements, guards: Guards) -> list[Move] | None:
    """The moves of the projection and of what stands between it and the sum, in graph order."""
    behind: list[fx.Node] = []
    node = addend
    while op_name(node) in VIEWS or op_name(node) in MARKERS or _adds_bias(node):
        behind.append(node)
        node = node.all_input_nodes[0]
    op = op_name(node)
    if op not in PRODUCTS or not all(_reliable(one, plan, facts, guards) for one in (node, *behind)):
        return None
    name, matrix, vector = PRODUCTS[op]
    given = named_arguments(node)
    operand, weight = given[name], known_spec(given[matrix])
    shape = shape_of(node)
    if weight is None or len(weight.shape) != 2 or len(shape) < 2 or not _is_attention(operand):
        return None
    shard = residual.shard.along(token_dim(shape))
    weights = [given[matrix], *([] if given.get(vector) is None else [given[vector]])]
    if shape[shard.dim] % shard.members or not guards.projection_allows(operand, weights, shard, facts):
        return None
    found = [Move(node, op, shard, PROJECTED, None, name, pattern="P5")]
    for one in reversed(behind):
        before = found[-1]
        if op_name(one) in VIEWS:
            dim = guards.viewed_dim(shape_of(before.node), before.shard, shape_of(one))
            if dim is None:
                return None
            found.append(Move(one, op_name(one), shard.along(dim), PROJECTED, before.node))
        elif op_name(one) in MARKERS:
            found.append(Move(one, op_name(one), before.shard, PROJECTED, before.node, "x"))
        else:
            if not facts.replicated(one.all_input_nodes[1], shard.group):
                return None
            found.append(Move(one, ADD, before.shard, PROJECTED, before.node, "self"))
    mine = found[-1].shard.dim - len(shape_of(addend))
    aligned = residual.shard.dim - len(shape_of(residual.node)) == mine
    return found if aligned and found[-1].shard.along(0) == residual.shard.along(0) else None


def _adds_bias(node: fx.Node) -> bool:
    """Whether a node adds a vector to what may be a projection."""
    operands = node.all_input_nodes
    if op_name(node) != ADD or len(operands) != 2 or node.args[:2] != (operands[0], operands[1]):
        return False
    vector, spec = known_spec(operands[1]), known_spec(node)
    alone = len(node.args) == 2 and not node.kwargs
    return alone and vector is not None and spec is not None and len(vector.shape) == 1 and len(spec.shape) > 1


def _reliable(node: fx.Node, plan: MovePlan, facts: Placements, guards: Guards) -> bool:
    """Whether a node can move as far as it is concerned alone."""
    known = not facts.mutated(node) and node not in plan.moves and known_spec(node) is not None
    checked = [one for one in (node, *node.all_input_nodes) if one.op == "call_function"]
    return known and is_contiguous(node) and all(map(guards.metadata_allows, checked))


def _is_attention(value: Any) -> bool:
    while isinstance(value, fx.Node) and op_name(value) in _TURNS:
        value = value.all_input_nodes[0]
    return isinstance(value, fx.Node) and op_name(value) in _ATTENTION


__all__ = ["PROJECTED", "AttentionGuards", "move_projection"]
