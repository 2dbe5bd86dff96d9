"""Storage: which values of a program's graph share memory, which parts of it they take, and what its nodes write into.

Values are tracked from the placeholders on, which have separate storage: see `program.specs`. If specs are missing,
the schemas of ops are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from tcverify.checks.memory.parts import ByteRange, byte_range_of
from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec, aliased_operands, lookup, mutated_operands, schema_of
from tcverify.ops.leaves import leaves
from tcverify.program.graph import in_host_ir
from tcverify.program.specs import InferredSpecs, storages_of


@dataclass(slots=True)
class GraphMemory:
    """What the nodes of a graph hold and write, by their numbers in graph order.

    Storages are numbers. Two views of one storage count as one, even if they do not overlap: which elements a
    kernel accesses is never known exactly, and runtimes track storages.

    Attributes:
        holds: the storages of the tensors in a node's value; empty for values without tensors.
        writes: the storages of earlier values that a node writes into.
        unknown: nodes of which it is not known what they write and alias: they count as reading their operands and
            creating a new value.
        nbytes: storage → its extent in bytes, as far as values reach. Unknown storages are not in it.
        regions: where in their storages the tensors of a node's value lie; empty if unknown.
        touches: of a graph in host IR, the accesses of each node to parts of storages; empty for other graphs.
    """

    holds: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    unknown: list[int]
    nbytes: dict[int, int]
    regions: list[tuple[Region, ...]]
    touches: list[tuple[Touch, ...]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Touch:
    """An operand, or a new result, of a call.

    Attributes:
        storage: which one.
        through: number of the node whose value it is.
        part: which bytes; None if unknown.
        writes: whether the call writes into it.
    """

    storage: int
    through: int
    part: ByteRange | None
    writes: bool


#: Bytes of a storage, from the first to past the last element of a value: (storage, first, end).
Region = tuple[int, int, int]


def regions_of(value: Any) -> tuple[Region, ...]:
    """Return where the tensors of a value, given as specs, lie in their storages."""
    if isinstance(value, TensorSpec):
        if value.alias is None:
            return ()
        if not value.numel:
            return ((value.alias, 0, 0),)
        size = value.dtype.itemsize
        return ((value.alias, value.offset * size, value.extent * size),)
    return tuple(region for spec in leaves(value, TensorSpec) for region in regions_of(spec))


def memory_of(graph: fx.Graph, constants: Mapping[str, Any]) -> GraphMemory:
    """Return what the nodes of a program's graph hold and write. Linear in the graph; never raises."""
    values = InferredSpecs()
    memory = GraphMemory([], [], [], {}, [])
    holds: dict[fx.Node, tuple[int, ...]] = {}
    attributes: dict[str, tuple[int, ...]] = {}
    numbers: dict[fx.Node, int] | None = {} if in_host_ir(graph) else None
    for number, node in enumerate(graph.nodes):
        writes: tuple[int, ...] = ()
        if node.op == "output":
            held = tuple(dict.fromkeys(s for operand in node.all_input_nodes for s in holds[operand]))
        elif node.op in ("placeholder", "get_attr"):
            held = _input(node, values, attributes)
        else:
            try:
                if node.op != "call_function" or any(operand not in values.of for operand in node.all_input_nodes):
                    raise UnsupportedOp(node.name, "not inferred")
                spec = values.infer(node, constants)
                values.keep(node, spec)
                held, writes = storages_of(spec), _written(node, holds)
            except (UnsupportedOp, ShapeError, ProgramError):
                described = _as_described(node, values, holds)
                if described is None:
                    memory.unknown.append(number)
                held, writes = described or (_apart(node, values), ())
        regions = regions_of(values.of.get(node))
        for storage, _, end in regions:
            memory.nbytes[storage] = max(memory.nbytes.get(storage, 0), end)
        memory.regions.append(regions)
        holds[node] = held
        memory.holds.append(held)
        memory.writes.append(writes)
        if numbers is not None:
            numbers[node] = number
            memory.touches.append(_touches(node, numbers, holds, values))
    return memory


def _touches(
    node: fx.Node, numbers: Mapping[fx.Node, int], holds: Mapping[fx.Node, tuple[int, ...]], values: InferredSpecs
) -> tuple[Touch, ...]:
    """What a node reads and writes, each part once; what it creates counts as written."""
    written = set(mutated_operands(node))
    found: dict[Touch, None] = {}
    known: set[int] = set()
    for operand in node.all_input_nodes:
        known.update(holds[operand])
        found.update(dict.fromkeys(_parts(operand, numbers[operand], holds[operand], values, operand in written)))
    if node.op != "output":
        own = [storage for storage in holds[node] if storage not in known]
        found.update(dict.fromkeys(_parts(node, numbers[node], own, values, writes=True)))
    return tuple(found)


def _parts(node: fx.Node, number: int, storages: Sequence[int], values: InferredSpecs, writes: bool) -> Iterator[Touch]:
    """The parts of storages that a value takes; tensors without elements take none."""
    specs = leaves(values.of.get(node), TensorSpec)
    for storage in storages:
        mine = [spec for spec in specs if spec.alias == storage]
        parts = [byte_range_of(spec) for spec in mine]
        yield from (Touch(storage, number, part, writes) for part in parts if part is not None)
        if not mine:
            yield Touch(storage, number, None, writes)


def _input(node: fx.Node, values: InferredSpecs, attributes: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    if node.op == "get_attr" and str(node.target) in attributes:
        return attributes[str(node.target)]  # without a spec: the schemas of ops decide from here on
    held = _apart(node, values)
    if node.op == "get_attr":
        attributes[str(node.target)] = held
    return held


def _apart(node: fx.Node, values: InferredSpecs) -> tuple[int, ...]:
    """The storages of a node that counts as a new value: as recorded, or else an unknown one."""
    recorded = node.meta.get("val")
    return (values.fresh(),) if recorded is None else storages_of(values.keep_apart(node, recorded))


def _as_described(
    node: fx.Node, values: InferredSpecs, holds: Mapping[fx.Node, tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """What a call holds and writes according to the schema of its op; None without a schema."""
    if node.op != "call_function":
        return None
    op = lookup(node.target)
    if op.name == "python::getitem" and node.all_input_nodes:
        return holds[node.all_input_nodes[0]], ()
    if op.name.startswith("python::"):
        return _apart(node, values), ()
    schema = schema_of(node.target)
    if schema is None:
        return None
    if any(r.alias_info is not None for r in schema.returns):
        shared = tuple(dict.fromkeys(s for o, _ in aliased_operands(node) for s in holds[o]))
        return shared, _written(node, holds)
    if op.run is not None and op.aliases and not schema.is_mutable:
        return None  # tagged as possibly sharing storage, without saying with what
    return _apart(node, values), _written(node, holds)


def _written(node: fx.Node, holds: Mapping[fx.Node, tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(s for operand in mutated_operands(node) for s in holds[operand]))


__all__ = ["GraphMemory", "Region", "Touch", "memory_of"]
