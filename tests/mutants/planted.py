"""What each planted defect gets wrong, as nodes of the rewritten graph: the ground truth that diagnoses are held against.

A defect lies in the nodes that the sound pass defines otherwise, given the same program, unless they differ merely because an
operand does: `redefined`. Where a mutant takes another decision than the sound pass, much differs that is right in itself, and a
rule of its own says what is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from tcverify.ops import RECORD, WAIT, TensorSpec, mutated_operands
from tcverify.passes import Multistream, Pass, SequenceParallel
from tcverify.passes.editing import op_name
from tcverify.program import Program
from tests.mutants import multistream, sequence_parallel
from tests.mutants.catalogue import MUTANTS

#: Defects whose nodes are told: those that redefine or synchronise nodes, not those that move them or place them in buffers.
KNOWN: tuple[str, ...] = (*sequence_parallel.MUTANTS, *multistream.MUTANTS)

#: From the mutant's graph and the sound pass's graph of one rank: the names of the nodes that are wrong. A node that the mutant
#: lacks counts by its name in the sound pass's graph.
Rule = Callable[[fx.Graph, fx.Graph], set[str]]


def planted(name: str, program: Program) -> dict[int, frozenset[str]]:
    """Return per rank the nodes that a mutant gets wrong in a program."""
    sound: type[Pass] = SequenceParallel if name in sequence_parallel.MUTANTS else Multistream
    rule = RULES.get(name) or (redefined if name in sequence_parallel.MUTANTS else synchronised)
    found = {}
    for rank in range(program.mesh.world_size):
        found[rank] = frozenset(rule(_rewritten(MUTANTS[name], program, rank), _rewritten(sound, program, rank)))
    return found


def _rewritten(pass_: type[Pass], program: Program, rank: int) -> fx.Graph:
    module = program.graph_module(rank)
    answer = pass_()(module)
    return (module if answer is None else answer).graph


def definition(node: fx.Node) -> Any:
    """What a node computes, from operands by name."""

    def plain(value: Any) -> str:
        return repr(map_arg(value, lambda operand: operand.name))

    return node.op, str(node.target), plain(node.args), plain(node.kwargs)


def differing(mutant: fx.Graph, sound: fx.Graph) -> list[fx.Node]:
    """The nodes of the mutant's graph that the sound pass defines otherwise, or not at all."""
    known = {node.name: definition(node) for node in sound.nodes}
    return [node for node in mutant.nodes if known.get(node.name) != definition(node)]


def gone(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    """The nodes that the mutant's graph lacks."""
    kept = {node.name for node in mutant.nodes}
    return {node.name for node in sound.nodes} - kept


def redefined(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    """What is defined otherwise though its operands are not; of the output, the values that it should not return."""
    other: set[str] = set()
    roots: set[str] = set()
    for node in differing(mutant, sound):
        if not any(operand.name in other for operand in node.all_input_nodes):
            roots |= wrongly_returned(mutant, sound) if node.op == "output" else {node.name}
        other.add(node.name)
    return roots


def wrongly_returned(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    """What the output returns at places where it returns something else in the sound graph."""

    def returned(graph: fx.Graph) -> list[str]:
        return [getattr(leaf, "name", str(leaf)) for leaf in pytree.tree_leaves(graph.output_node().args[0])]

    return {mine for mine, right in zip(returned(mutant), returned(sound), strict=True) if mine != right}


def of_name(*prefixes: str) -> Rule:
    """What is defined otherwise and has a name that begins so."""
    return lambda mutant, sound: {n.name for n in differing(mutant, sound) if n.name.startswith(prefixes)}


def ops_kept(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    """Ops of both graphs that read other operands."""
    return {n.name for n in differing(mutant, sound) if n.op != "output"} & {n.name for n in sound.nodes}


def redefined_or_gone(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    return redefined(mutant, sound) | gone(mutant, sound)


def moved(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    """Reduce_scatters behind which other nodes stand."""

    def behind(graph: fx.Graph) -> dict[str, set[str]]:
        names = [node.name for node in graph.nodes]
        return {name: set(names[i:]) for i, name in enumerate(names) if name.startswith("reduce_scatter")}

    right = behind(sound)
    return {name for name, rest in behind(mutant).items() if rest != right[name]}


# ------------------------------------------------------------------------------------------------------------- streams


def synchronised(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    """Anchors that differ, and what they synchronise: the op that a wait gates (for the outputs, what they return), the ops that
    it should wait for, and the op that a record records."""
    other = {n.name for n in differing(mutant, sound)}
    found = {name for name in other if name != "output"}
    for graph in (mutant, sound):
        found |= _synchronised(graph, other | gone(mutant, sound))
    awaited, right = _awaited(mutant), _awaited(sound)
    for wait, ops in right.items():
        found |= ops - awaited.get(wait, set())
    return found


def recorded_late(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    """Records that another node stands in front of, besides what is synchronised otherwise."""

    def before(graph: fx.Graph) -> dict[str, str]:
        return {node.name: node.prev.name for node in graph.nodes if op_name(node) == RECORD}

    right = before(sound)
    return synchronised(mutant, sound) | {name for name, node in before(mutant).items() if right.get(name) != node}


def _awaited(graph: fx.Graph) -> dict[str, set[str]]:
    """By wait, the ops whose completion it waits for."""
    return {n.name: {token.args[0].name for token in n.args[2]} for n in graph.nodes if op_name(n) == WAIT}


def _synchronised(graph: fx.Graph, names: set[str]) -> set[str]:
    found = set()
    for node in graph.nodes:
        if node.name not in names:
            continue
        if op_name(node) == RECORD:
            found.add(node.args[0].name)
        if op_name(node) == WAIT:
            readers = {user for user in node.users if user.op != "output"}
            found |= {user.name for user in readers}
            if len(readers) < len(node.users) or not node.users:
                found |= {node.args[0].name, *_written_into(graph, node.args[0])}
    return found


def _written_into(graph: fx.Graph, value: fx.Node) -> set[str]:
    """What writes into a value that the outputs wait for."""
    return {node.name for node in graph.nodes if node.op == "call_function" and value in mutated_operands(node)}


def reordered(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    """Ops in front of which other ops stand, besides what is synchronised otherwise."""

    def before(graph: fx.Graph) -> dict[str, set[str]]:
        ops = [n.name for n in graph.nodes if n.op == "call_function" and op_name(n) not in (RECORD, WAIT)]
        return {name: set(ops[:i]) for i, name in enumerate(ops)}

    right = before(sound)
    return synchronised(mutant, sound) | {name for name, ops in before(mutant).items() if right.get(name) != ops}


def described(mutant: fx.Graph, sound: fx.Graph) -> set[str]:
    """Nodes whose metadata has another shape, dtype or sharing of storage."""

    def layouts(graph: fx.Graph) -> dict[str, Any]:
        first: dict[Any, str] = {}
        found = {}
        for node in graph.nodes:
            leaves = [v for v in pytree.tree_leaves(node.meta.get("val")) if hasattr(v, "untyped_storage")]
            shared = [first.setdefault(v.untyped_storage()._cdata, node.name) for v in leaves]
            found[node.name] = ([TensorSpec.of(v).layout for v in leaves], shared)
        return found

    right = layouts(sound)
    return {name for name, layout in layouts(mutant).items() if name in right and right[name] != layout}


RULES: dict[str, Rule] = {
    "VaryingAddendSliced": of_name("residual_shard"),
    "BroadcastAddendSliced": of_name("residual_shard"),
    "ResidualOfAnotherGroup": ops_kept,
    "ResidualInAnotherOrder": ops_kept,
    "ResidualGatheredAlongAnotherDim": ops_kept,
    "LocalReadersHideFullOnes": lambda mutant, sound: redefined(mutant, sound) | wrongly_returned(mutant, sound),
    "GatherSkippedOnFirstRank": redefined_or_gone,
    "AllReduceErasedOnFirstRank": redefined_or_gone,
    "ScatterMovedOnOddRanks": moved,
    "OneScatterForAllGroups": of_name("rms_norm", "add_rms_norm", "add", "_internal_mark", "view"),
    "MarkerMovesAlone": of_name("_internal_mark"),
    "ViewMergesTokens": lambda mutant, sound: {n.name for n in differing(mutant, sound) if n.name.endswith("_shard")},
    "TupleLeftLocal": of_name("add_rms_norm2"),
    "WeightPerTokenAccepted": ops_kept,
    "WritesIgnored": ops_kept,
    "StaleMetadata": described,
    "GatherHasLocalMetadata": described,
    "ScattersShareStorage": described,
    "WriteMovedBeforeRead": reordered,
    "RecordedWhereNeeded": recorded_late,
    "CostsOrderCollectives": reordered,
    "ProgramOrder": reordered,
    "WaitsShareStorage": described,
    "TokensLookLikeValues": described,
}

assert set(RULES) <= {*sequence_parallel.MUTANTS, *multistream.MUTANTS}
