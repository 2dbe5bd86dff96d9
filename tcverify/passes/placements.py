"""Placement propagation: which values of one rank's graph are known to be equal on, or sharded over, which groups.

A pass sees the graph of one rank only, so the analysis rests on one precondition: the ranks run graphs that are equal up to
rank constants (rank numbers, groups, offsets, split sizes) and in metadata, and the members of a group meet in it at the same
nodes. Anything that an integer could make different on another rank counts as different: slices and selections, and elementwise
ops with an integer operand, give unknown values, and so does every op that is not listed here. Listed ops
preserve replication: equal operands give equal results. Of calls whose numbers are said to be the same on all ranks,
integers make no difference, and slices and what is made of numbers alone are equal, too.

Collectives of both dialects are read, those that name ranks and those that name a group: the caller says which ranks that is.
The result of an asynchronous one counts from its start, since it must not be read before it has been waited for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tcverify.ops import lookup
from tcverify.passes.editing import known_spec, named_arguments
from tcverify.passes.storages import mutated_nodes
from tcverify.program import REPLICATED, VARYING, Placement, shard

#: aten ops, by name without overload. Elementwise: an integer among the arguments is an operand.
_ELEMENTWISE = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "reciprocal", "pow", "relu", "gelu",
        "silu", "sigmoid", "tanh", "erf", "sin", "cos", "maximum", "minimum", "where", "clamp", "masked_fill", "lt",
        "le", "gt", "ge", "eq", "ne", "logical_and", "logical_or", "logical_not", "isnan", "nan_to_num", "clone",
        "detach", "alias", "contiguous", "to", "_to_copy",
    }
)  # fmt: skip
#: Here an integer is a size, or a dim that the shape of the result tells, and values that are equal on all ranks have the same.
_STRUCTURAL = frozenset(
    {
        "view", "reshape", "_unsafe_view", "t", "unsqueeze", "squeeze", "expand", "flatten", "unflatten", "mm", "bmm", "matmul",
        "addmm", "baddbmm", "linear", "dot", "mv", "embedding", "scaled_dot_product_attention",
    }
)  # fmt: skip
#: Here an integer is a dim of which the shape of the result says nothing where sizes are equal.
_DIMMED = frozenset(
    {
        "permute", "transpose", "cat", "stack", "mean", "sum", "amax", "amin", "softmax", "_softmax", "layer_norm",
        "native_layer_norm", "rms_norm", "_fused_rms_norm",
    }
)  # fmt: skip
#: Here an integer picks a part, or is a value: they keep replication where it is the same on all ranks.
_NUMBERED = frozenset(
    {
        "slice", "select", "split", "split_with_sizes", "narrow", "unbind", "chunk", "roll", "flip", "repeat", "cumsum", "gather",
        "index", "index_select", "tril", "triu", "rsub", "square", "cos", "log_softmax", "_log_softmax", "var", "var_mean",
        "constant_pad_nd", "argmax", "floor_divide", "remainder", "bitwise_and", "bitwise_or", "bitwise_not", "ones_like",
        "zeros_like", "full_like", "new_zeros", "new_ones", "new_full",
    }
)  # fmt: skip
#: These make a value of numbers alone.
_CREATING = frozenset({"arange", "full", "ones", "zeros", "scalar_tensor", "eye", "linspace"})
_NORMS = frozenset(
    f"tensor_cast::{name}"
    for name in ("rms_norm", "add_rms_norm", "add_rms_norm2", "layer_norm", "modulated_layer_norm")
)
_POINTWISE = frozenset(f"tensor_cast::{name}" for name in ("silu", "gelu", "swiglu", "gated_residual_add"))
_QUANTISED = tuple(
    f"tensor_cast::{name}" for name in ("static_quant_linear", "static_quant_linear_int4", "fp8_linear", "mxfp4_linear")
)
_EXPERTS = tuple(
    f"tensor_cast::{name}"
    for name in (
        "moe_gating_top_k_softmax", "init_routing_v2", "grouped_matmul", "routed_matmul", "unpermute_tokens",
    )
)  # fmt: skip
_MIXING = frozenset({"tensor_cast::cat", "tensor_cast::attention", "python::matmul", *_QUANTISED, *_EXPERTS})
_OPERATORS = frozenset(f"python::{name}" for name in ("add", "sub", "mul", "truediv", "neg"))
_WHOLE = frozenset(
    {
        "tensor_cast::all_reduce",
        "tensor_cast::matmul_all_reduce",
        "tensor_cast::all_gather",
        *(f"{name}_all_reduce" for name in _QUANTISED),
    }
)
_SCATTER = "tensor_cast::reduce_scatter"
#: Asynchronous collectives whose results are equal on all members. Those that write into an operand are not among them.
_NAMED_WHOLE = frozenset(
    f"_c10d_functional::{name}{form}"
    for name in ("all_reduce", "all_gather_into_tensor")
    for form in ("", "_coalesced")
) | {"_c10d_functional::broadcast", "symm_mem::one_shot_all_reduce"}
_NAMED_SCATTER = "_c10d_functional::reduce_scatter_tensor"


@dataclass(frozen=True)
class Placements:
    """What `propagate` found. Values of other graphs, and nodes inserted since, are unknown: varying."""

    _groups: dict[frozenset[int], int]  # each set of ranks that the graph names, and its bit
    _equal: dict[fx.Node, int] = field(default_factory=dict)  # over which of them the value is replicated
    _shards: dict[fx.Node, dict[tuple[int, ...], int]] = field(default_factory=dict)
    _mutated: frozenset[fx.Node] = frozenset()

    def replicated(self, node: fx.Node, group: Sequence[int]) -> bool:
        """Whether the value is known to be equal on all ranks of `group`; their order does not matter."""
        members = frozenset(group)
        mask = self._equal.get(node, 0)
        return any(mask & bit and members <= known for known, bit in self._groups.items())

    def placement(self, node: fx.Node, group: tuple[int, ...]) -> Placement:
        """Replicated, shard(dim) (position in the ordered group picks the chunk), or varying: nothing is known."""
        if self.replicated(node, group):
            return REPLICATED
        dim = self._shards.get(node, {}).get(group)
        return VARYING if dim is None else shard(dim)

    def mutated(self, node: fx.Node) -> bool:
        """Whether the graph may write into the storage of this value, before or after the node."""
        return node in self._mutated


def propagate(
    graph: fx.Graph,
    groups: Mapping[str, Sequence[int]] | None = None,
    same_numbers: Collection[str] = (),
    same_dims: Collection[str] | None = None,
) -> Placements:
    """Walk `graph` forward once, from the facts in `placeholder.meta["placement"]` (group → `Placement`).

    Nothing is known of values that the graph writes into, nor of their aliases.

    Args:
        groups: the ranks of the groups that collectives name, in order; of collectives on others nothing is known.
        same_numbers: names of the calls whose integers are the same on all ranks that run them.
        same_dims: names of those in which they are if they are dims; None: in all.
    """
    groups = groups or {}
    found = Placements(_named_groups(graph, groups), _mutated=mutated_nodes(graph))
    within = _Within(found._groups)
    for node in graph.nodes:
        if found.mutated(node):
            continue
        if node.op == "placeholder":
            _take_facts(node, found, within)
            continue
        if node.op != "call_function" or lookup(node.target).run is None:
            continue
        name = lookup(node.target).name
        group = _whole_over(node, name, groups)
        if group is not None:
            # Equal on the members; of ranks outside the group, whose operands this graph does not show, nothing is known.
            found._equal[node] = within[frozenset(group)]
        elif name == _SCATTER or (groups and name == _NAMED_SCATTER):
            scattered = _scattered_over(node, name, groups)
            if scattered is not None:
                found._shards[node] = scattered
        elif lookup(node.target).phase == "wait":
            _hand_on(node, found)
        elif _keeps_replication(node, name, node.name in same_numbers, same_dims is None or node.name in same_dims):
            _compute(node, name, found)
    return found


class _Within(dict[frozenset[int], int]):
    """By group: the bits of all named sets inside it. What is equal on all its ranks is equal on some.

    Args:
        named: each set of ranks that the graph names, and its bit.
    """

    def __init__(self, named: Mapping[frozenset[int], int]) -> None:
        super().__init__()
        self._named = named

    def __missing__(self, members: frozenset[int]) -> int:
        self[members] = found = sum(bit for known, bit in self._named.items() if known <= members)
        return found


def _take_facts(node: fx.Node, found: Placements, within: Mapping[frozenset[int], int]) -> None:
    """Note what is given of a placeholder."""
    for group, placement in (node.meta.get("placement") or {}).items():
        if placement.kind == "replicated":
            found._equal[node] = found._equal.get(node, 0) | within[frozenset(group)]
        elif placement.kind == "shard":
            found._shards.setdefault(node, {})[group] = placement.dim


def _hand_on(node: fx.Node, found: Placements) -> None:
    """Note of a wait what is known of its operand; of the items of a list nothing is."""
    operand, *others = node.all_input_nodes
    if others:
        return
    found._equal[node] = found._equal.get(operand, 0)
    if operand in found._shards:
        found._shards[node] = found._shards[operand]


def _compute(node: fx.Node, name: str, found: Placements) -> None:
    """Note what equal operands, and sharded ones, make of the result of a call."""
    mask = -1
    for operand in node.all_input_nodes:
        mask &= found._equal.get(operand, 0)
    if mask and (node.all_input_nodes or _aten_base(name) in _CREATING):
        found._equal[node] = mask
    shards = _kept_shards(node, name, found)
    if shards:
        found._shards[node] = shards


def _whole_over(node: fx.Node, name: str, groups: Mapping[str, Sequence[int]]) -> Sequence[int] | None:
    """The group on whose members a collective gives equal results, if it is one that does."""
    if name in _WHOLE:
        ranks: Sequence[int] = named_arguments(node)["rank_group"]
        return ranks
    return groups.get(named_arguments(node)["group_name"]) if groups and name in _NAMED_WHOLE else None


def _scattered_over(node: fx.Node, name: str, groups: Mapping[str, Sequence[int]]) -> dict[tuple[int, ...], int] | None:
    """How a reduce_scatter divides its result: ordered group → dim."""
    given, spec = named_arguments(node), known_spec(node)
    group = given["rank_group"] if name == _SCATTER else groups.get(given["group_name"])
    if spec is None or group is None:
        return None
    return {tuple(group): given["dim"] % len(spec.shape) if name == _SCATTER else 0}


def _named_groups(graph: fx.Graph, groups: Mapping[str, Sequence[int]]) -> dict[frozenset[int], int]:
    found: dict[frozenset[int], int] = {}
    for node in graph.nodes:
        named: list[Any] = []
        if node.op == "placeholder":
            named += node.meta.get("placement") or {}
        elif node.op == "call_function":
            group = _whole_over(node, lookup(node.target).name, groups)
            named += [] if group is None else [group]
        for group in named:
            found.setdefault(frozenset(group), 1 << len(found))
    return found


def _keeps_replication(node: fx.Node, name: str, same_numbers: bool, same_dims: bool) -> bool:
    """Whether equal operands on several ranks give equal results, whatever the rank constants are.

    Args:
        same_numbers: whether the integers of this call are no rank constants.
        same_dims: whether they are none if they are dims.
    """
    if name == "python::getitem":
        val = node.args[0].meta.get("val") if isinstance(node.args[0], fx.Node) else None
        return isinstance(val, (tuple, list))  # which of several results: not an offset
    if name in _MIXING or lookup(node.target).identity:
        return True
    if name in _NORMS or name in _POINTWISE or _is_elementwise(name):
        return same_numbers or not (_has_integer(node.args) or _has_integer(node.kwargs))
    if _aten_base(name) in _NUMBERED or _aten_base(name) in _CREATING:
        return same_numbers
    if _aten_base(name) in _DIMMED:
        return same_dims
    return _aten_base(name) in _STRUCTURAL


def _is_elementwise(name: str) -> bool:
    return _aten_base(name) in _ELEMENTWISE or name in _OPERATORS or name == "prims::convert_element_type"


def _aten_base(name: str) -> str:
    namespace, _, rest = name.partition("::")
    return rest.split(".")[0] if namespace == "aten" else ""


def _has_integer(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_has_integer(v) for v in value)
    if isinstance(value, dict):
        return any(_has_integer(v) for v in value.values())
    return type(value) is int


def _kept_shards(node: fx.Node, name: str, found: Placements) -> dict[tuple[int, ...], int]:
    """The shards that a row-by-row op hands on: operands of the result's shape are sharded alike, smaller ones replicated."""
    norm = name in _NORMS
    if not (norm or name in _POINTWISE or _is_elementwise(name) or lookup(node.target).identity):
        if name == "python::getitem" and isinstance(node.args[0], fx.Node):
            return found._shards.get(node.args[0], {})
        return {}
    operands = node.all_input_nodes
    candidates = next((found._shards[o] for o in operands if o in found._shards), {})
    kept = {}
    for group, dim in candidates.items():
        whole = known_spec(next(o for o in operands if o in found._shards))
        if whole is None or (norm and dim == len(whole.shape) - 1):
            continue
        if all(_fits(o, whole.shape, dim, group, found) for o in operands):
            kept[group] = dim
    return kept


def _fits(operand: fx.Node, shape: tuple[int, ...], dim: int, group: tuple[int, ...], found: Placements) -> bool:
    spec = known_spec(operand)
    if spec is None:
        return False
    if spec.shape == shape:
        return found._shards.get(operand, {}).get(group) == dim
    axis = len(spec.shape) - (len(shape) - dim)
    reaches = axis >= 0 and spec.shape[axis] != 1
    return len(spec.shape) <= len(shape) and not reaches and found.replicated(operand, group)
