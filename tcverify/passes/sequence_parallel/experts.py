"""P4: a mixture of experts works on this rank's tokens.

An op that treats tokens independently can read a shard in place of all tokens: the gate, the choice of experts, a shared
expert. Routing orders the tokens at hand by expert, so on a shard it makes other rows than a part of all rows: they can be
multiplied, row by row, by the matrix of their expert, and put back by the choices that they were routed by, and are good for
nothing else. No weight may differ between the ranks, or the tokens of a rank would not meet those of the others; and nothing may
depend on how many tokens there are, such as sizes of chunks or capacities that are written into the graph: ops that could are not
among those that move.

A value that moves so has one of these stages:

    "tokens": computed token by token from a value that was there as a shard before: logits, shares, choices, a shared expert.
    "rows": routed rows of this rank's tokens.
    "experts": computed from what the experts made of them, by token again.

Values of the first two move for the sake of others that do; rows that someone reads in full do not move at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from tcverify.passes.editing import known_spec, named_arguments, op_name
from tcverify.passes.placements import Placements
from tcverify.passes.sequence_parallel.layout import ADD, GETITEM, Move, Shard, Stage, is_contiguous, shape_of
from tcverify.passes.sequence_parallel.moves import Guards, MovePlan

GATE, ROUTE, MULTIPLY, RETURN = (
    f"tensor_cast::{name}"
    for name in ("moe_gating_top_k_softmax", "init_routing_v2", "routed_matmul", "unpermute_tokens")
)
#: Products of tokens by one matrix, and the names of tokens, matrix and bias.
PRODUCTS = {
    "aten::mm": ("self", "mat2", ""),
    "aten::matmul": ("self", "other", ""),
    "aten::linear": ("input", "weight", "bias"),
}
#: Elementwise ops, with the names of their operands.
_ELEMENTWISE = {
    **{f"aten::{name}.Tensor": ("self", "other") for name in ("add", "sub", "mul", "div")},
    **{f"aten::{name}": ("self",) for name in ("sigmoid", "silu", "gelu", "relu", "tanh", "exp", "neg", "_to_copy")},
    "tensor_cast::silu": ("x",),
    "tensor_cast::gelu": ("x",),
    "tensor_cast::swiglu": ("gate", "up"),
}  # fmt: skip
#: Reductions over some dims.
_REDUCING = frozenset({"aten::sum.dim_IntList", "aten::mean.dim", "aten::amax", "aten::amin"})

#: Stages of this module's moves. Of those that are useful only to others, and of those that cannot be gathered.
STAGES: frozenset[Stage] = frozenset({"tokens", "rows", "experts"})
SERVING: frozenset[Stage] = frozenset({"tokens", "rows"})
ROUTED: Stage = "rows"
#: Stages of values that are there as a shard anyway, of which tokens can be taken.
_LOCAL: frozenset[Stage] = frozenset({"normed", "residual", "added", "tokens", "experts"})


class ExpertGuards:
    """What the pass asks before it lets a mixture of experts move."""

    def expert_weight_allows(self, weight: Any, shard: Shard, facts: Placements) -> bool:
        """Whether a matrix, or the matrices or biases of all experts, are the same on all members."""
        return isinstance(weight, fx.Node) and facts.replicated(weight, shard.group)

    def rows_allow(self, rows: Move, choices: Move) -> bool:
        """Whether rows were routed by these choices, so that they say which expert each row is for, and whose token it is."""
        return rows.routing is not None and rows.routing == routing_of(choices)

    def tokens_allow(self, tokens: Move, choices: Move) -> bool:
        """Whether tokens and choices are divided alike, so that each token meets its own choices."""
        same = shape_of(tokens.node)[:-1] == shape_of(choices.node)[:-1]
        return same and tokens.shard == choices.shard and choices.stage == "tokens"

    def beside_allows(self, operand: Any, result: tuple[int, ...], shard: Shard, facts: Placements) -> bool:
        """Whether an operand that does not move can be combined with tokens: a number, or equal on all members, without tokens.

        Args:
            result: the shape of the result, whose division is `shard`.
        """
        if not isinstance(operand, fx.Node):
            return isinstance(operand, float)  # an integer may be another one on other ranks
        spec = known_spec(operand)
        if spec is None or not facts.replicated(operand, shard.group):
            return False
        axis = len(spec.shape) - len(result) + shard.dim
        return axis < 0 or spec.shape[axis] == 1

    def reduced_dims_allow(self, dims: Sequence[int], shard: Shard) -> bool:
        """Whether a reduction over these dims leaves tokens apart."""
        return shard.dim not in dims


def routing_of(choices: Move) -> tuple[fx.Node, int]:
    """What tells choices from others: the value itself, or the tuple and which of its items it is."""
    node = choices.node
    if op_name(node) != GETITEM:
        return node, 0
    both, item = node.args
    assert isinstance(both, fx.Node)
    assert isinstance(item, int)
    return both, item % 2


@dataclass(frozen=True, slots=True)
class _Asked:
    """A node that might move, and all that is known when it is its turn."""

    node: fx.Node
    op: str
    given: dict[str, Any]
    plan: MovePlan
    facts: Placements
    guards: Guards

    def local(self, name: str, stages: frozenset[Stage] = _LOCAL) -> Move | None:
        """The move of an operand of one of these stages. Only tensor_cast's division into shards along a dim counts."""
        operand = self.given.get(name)
        move = self.plan.moves.get(operand) if isinstance(operand, fx.Node) else None
        return move if move is not None and move.stage in stages and type(move.shard) is Shard else None

    def moves(self, shard: Shard, stage: Stage, source: Move, operand: str, **fields: Any) -> Move | None:
        """The move of the node, if its result can be gathered as it lies in memory."""
        results = [user for user in self.node.users if op_name(user) == GETITEM] if fields.get("items") else [self.node]
        if not all(map(is_contiguous, results)):
            return None
        return Move(self.node, self.op, shard, stage, source.node, operand, **fields)


def expert_move(node: fx.Node, op: str, plan: MovePlan, facts: Placements, guards: Guards) -> Move | None:
    """The move of a node of a mixture of experts, or beside one; None if it is none or cannot move."""
    if "P4" not in guards.patterns:
        return None
    if op not in _RULES and op not in PRODUCTS and op not in _ELEMENTWISE and op not in _REDUCING:
        return None
    asked = _Asked(node, op, named_arguments(node), plan, facts, guards)
    if op in PRODUCTS:
        return _product(asked)
    if op in _ELEMENTWISE:
        return _elementwise(asked)
    return _reduced(asked) if op in _REDUCING else _RULES[op](asked)


def _product(asked: _Asked) -> Move | None:
    """Tokens by a matrix."""
    name, matrix, vector = PRODUCTS[asked.op]
    tokens, weight = asked.local(name), known_spec(asked.given[matrix])
    if tokens is None or weight is None or len(weight.shape) != 2 or asked.given[matrix] is tokens.node:
        return None
    if tokens.shard.dim == len(shape_of(tokens.node)) - 1:
        return None  # it is summed over
    bias = asked.given.get(vector)
    operands = [asked.given[matrix], *([bias] if bias is not None else [])]
    if not all(asked.guards.expert_weight_allows(w, tokens.shard, asked.facts) for w in operands):
        return None
    return asked.moves(tokens.shard, "tokens", tokens, name)


def _elementwise(asked: _Asked) -> Move | None:
    names = _ELEMENTWISE[asked.op]
    spec = known_spec(asked.node)
    stages = STAGES | _LOCAL
    found = {name: move for name in names if (move := asked.local(name, stages)) is not None}
    if asked.op == ADD and any(move.stage == "experts" for move in found.values()):
        # A shared expert that is divided over the ranks: its pending sum becomes this rank's part of it.
        found = {name: move for name in names if (move := asked.local(name, stages | {"reduced"})) is not None}
    if spec is None or not found or not _adds_nothing_else(asked, found):
        return None
    moves = [found[name] for name in names if name in found]
    first = moves[0]
    rows = {move.stage == ROUTED for move in moves}
    if len(rows) == 2 or any(move.routing != first.routing for move in moves):
        return None
    aligned = {move.shard.along(move.shard.dim - len(shape_of(move.node)) + len(spec.shape)) for move in moves}
    shard = aligned.pop()
    if aligned or any(shape_of(m.node)[m.shard.dim] != spec.shape[shard.dim] for m in moves):
        return None
    beside = [asked.given[name] for name in names if name not in found and name in asked.given]
    if not all(asked.guards.beside_allows(other, spec.shape, shard, asked.facts) for other in beside):
        return None
    passed_on = {move.stage for move in moves}
    stage = ROUTED if ROUTED in passed_on else "experts" if "experts" in passed_on else "tokens"
    fields: dict[str, Any] = {"routing": first.routing}
    if len(moves) == 2:
        slot = next(name for name in names if found.get(name) is moves[1] and name != names[0])
        fields |= {"other": moves[1].node, "slot": slot, "local": True}
    return asked.moves(shard, stage, first, next(name for name in names if name in found), **fields)


def _adds_nothing_else(asked: _Asked, found: dict[str, Move]) -> bool:
    """Whether an elementwise op is not a residual sum, which P3 handles, and has no arguments that could differ between ranks."""
    if asked.op == ADD and not any(move.stage in STAGES for move in found.values()):
        return False
    if asked.op == ADD and any(move.stage in ("residual", "added", "normed") for move in found.values()):
        return False
    names = _ELEMENTWISE[asked.op]
    rest = {name: value for name, value in asked.given.items() if name not in names and value is not None}
    if asked.op == "aten::_to_copy":
        return rest.keys() <= {"dtype"}
    return all(isinstance(value, (float, str)) for value in rest.values())


def _reduced(asked: _Asked) -> Move | None:
    tokens = asked.local("self", STAGES | _LOCAL)
    given = asked.given
    if tokens is None or not given.get("dim") or given.get("dtype") is not None:
        return None
    rank = len(shape_of(tokens.node))
    dims = sorted({dim % rank for dim in ([given["dim"]] if isinstance(given["dim"], int) else given["dim"])})
    if not asked.guards.reduced_dims_allow(dims, tokens.shard):
        return None
    gone = 0 if given.get("keepdim") else sum(dim < tokens.shard.dim for dim in dims)
    stage = tokens.stage if tokens.stage in STAGES else "tokens"
    return asked.moves(tokens.shard.along(tokens.shard.dim - gone), stage, tokens, "self", routing=tokens.routing)


def _gate(asked: _Asked) -> Move | None:
    logits = asked.local("x")
    if (
        logits is None
        or logits.shard.dim == len(shape_of(logits.node)) - 1
        or not asked.guards.tuple_allows(asked.node)
    ):
        return None
    return asked.moves(logits.shard, "tokens", logits, "x", items=("tokens", "tokens"))


def _route(asked: _Asked) -> Move | None:
    tokens, choices = asked.local("x"), asked.local("topk_indices")
    if tokens is None or choices is None or not asked.guards.tokens_allow(tokens, choices):
        return None
    where: dict[str, Any] = {
        "other": choices.node,
        "slot": "topk_indices",
        "local": True,
        "routing": routing_of(choices),
    }
    return asked.moves(tokens.shard.along(0), ROUTED, tokens, "x", **where)


def _multiply(asked: _Asked) -> Move | None:
    rows, choices = asked.local("x", frozenset({ROUTED})), asked.local("topk_indices")
    if rows is None or choices is None or not asked.guards.rows_allow(rows, choices):
        return None
    weights = [asked.given["w"], *([] if asked.given["bias"] is None else [asked.given["bias"]])]
    if not all(asked.guards.expert_weight_allows(weight, rows.shard, asked.facts) for weight in weights):
        return None
    where: dict[str, Any] = {"other": choices.node, "slot": "topk_indices", "local": True, "routing": rows.routing}
    return asked.moves(rows.shard, ROUTED, rows, "x", **where)


def _return(asked: _Asked) -> Move | None:
    rows, choices = asked.local("x", frozenset({ROUTED})), asked.local("topk_indices")
    if rows is None or choices is None or not asked.guards.rows_allow(rows, choices):
        return None
    where: dict[str, Any] = {"other": choices.node, "slot": "topk_indices", "local": True, "pattern": "P4"}
    return asked.moves(choices.shard, "experts", rows, "x", **where)


_RULES = {GATE: _gate, ROUTE: _route, MULTIPLY: _multiply, RETURN: _return}

__all__ = [
    "GATE",
    "MULTIPLY",
    "RETURN",
    "ROUTE",
    "ROUTED",
    "SERVING",
    "STAGES",
    "ExpertGuards",
    "expert_move",
    "routing_of",
]
