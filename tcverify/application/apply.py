"""Runs a loaded pass on every rank's graph, in this process, and records what happened."""

from __future__ import annotations

import contextlib
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.application.loading import LoadedPass
from tcverify.application.pair import Defect, Foreign, Pair, PassFailure, Stage
from tcverify.application.pattern_matchers import ask_before_matches
from tcverify.application.pipeline import refresh_metadata
from tcverify.application.rank_sampling import AppliedRanks, Modules, RanksDiffer
from tcverify.application.side_effects import watch_global_state
from tcverify.errors import TcverifyError, Unsupported, UnsupportedOp
from tcverify.execution import Lockstep
from tcverify.ops import define_ops, late_definition, qualified_name
from tcverify.program import Allowed, NotSerialisable, Program, RewriteRequest, count_rewrites, decode_statistics, dumps
from tcverify.program.graph import KEPT_META, describe, first_difference, same_structure

#: Metadata of graphs, node by node, by rank.
Metadata: TypeAlias = Mapping[int, Sequence[tuple[Any, ...]]]


def apply_counted(loaded: LoadedPass, program: Program, allowed: Allowed) -> Pair:
    """Apply a pass as `apply_pass` does, and count its rewrites.

    Args:
        allowed: the rewrites that the pass may make.
    """
    with _counting(allowed) as asked, ask_before_matches():
        pair = apply_pass(loaded, program)
    pair.trace.rewrites = asked[: program.world_size]
    return pair


@dataclass(slots=True)
class _Counts:
    """The current counts: per rank, over all stages of a pipeline."""

    allowed: Allowed
    asked: list[list[RewriteRequest]]


_COUNTS: ContextVar[_Counts | None] = ContextVar("what is counted", default=None)


@contextlib.contextmanager
def _counting(allowed: Allowed) -> Iterator[list[list[RewriteRequest]]]:
    counts = _Counts(allowed, [])
    token = _COUNTS.set(counts)
    try:
        yield counts.asked
    finally:
        _COUNTS.reset(token)


def _call(loaded: LoadedPass, module: fx.GraphModule, rank: int) -> Any:
    """Call the pass, and count its rewrites if requested."""
    counts = _COUNTS.get()
    if counts is None:
        return loaded.call(module)
    while len(counts.asked) <= rank:
        counts.asked.append([])
    allowed = None if counts.allowed is None else counts.allowed[rank] if rank < len(counts.allowed) else frozenset()
    with count_rewrites(allowed) as asked:
        try:
            return loaded.call(module)
        finally:
            counts.asked[rank] += asked


def apply_pass(loaded: LoadedPass, program: Program, *, deep: bool = False, judge: bool = True) -> Pair:
    """Apply a pass to every rank's graph.

    Args:
        deep: also look for impurity, at about three times the cost: apply the pass a second time to fresh graphs and a
            second time to its own results, and run the generated code.
        judge: judge the graphs that it returned: otherwise `Pair.rewritten` stays None.

    Whatever the pass does, except crashing the process or hanging, is returned as data.
    """
    ranks = AppliedRanks.some_of(program) if _COUNTS.get() is None else AppliedRanks.all_of(program)
    try:
        return _apply_on(ranks, loaded, program, deep=deep, judge=judge)
    except RanksDiffer:
        return _apply_on(AppliedRanks.all_of(program), loaded, program, deep=deep, judge=judge)


def _apply_on(ranks: AppliedRanks, loaded: LoadedPass, program: Program, *, deep: bool, judge: bool) -> Pair:
    """Apply a pass on some ranks. Raises `RanksDiffer` if these do not determine what it does on the others."""
    pair = Pair(program)
    try:
        given = ranks.modules(program)
    except UnsupportedOp as error:  # another library has defined an op with another signature
        pair.foreign = Foreign(error.message)
        return pair
    define_ops()  # the pass may use any op; modules that define ops for it are imported by now
    metadata = {rank: _metadata(module.graph) for rank, module in given.items()}
    start = time.perf_counter()
    modules = _apply_stages(loaded, ranks, given, pair)
    pair.seconds = time.perf_counter() - start
    if modules is not None and judge:
        _judge(loaded, pair, ranks, modules, metadata, deep)
        if pair.changed and (pair.rewritten is None or pair.foreign is not None):
            pair.listing = _listing(pair.original, modules)
    return pair


def _judge(
    loaded: LoadedPass, pair: Pair, ranks: AppliedRanks, modules: Modules, metadata: Metadata, deep: bool
) -> None:
    """Create the rewritten program from the results of the pass, and record defects."""
    program = pair.original
    try:
        touched = _inspect(pair, modules, metadata, deep)
    except Exception as error:  # noqa: BLE001 - a graph can be broken in ways that no inspection foresees
        pair.defects.append(Defect("lint", 0, f"it cannot be inspected: {describe_error(error)}"))
    if any(d.aspect in ("lint", "signature") for d in pair.defects):
        return
    pair.rewritten = _program_of(program, ranks, modules, pair) if touched else program
    if deep and not pair.defects:
        _look_for_impurity(loaded, program, ranks, modules, pair)
    if pair.foreign is not None and pair.rewritten is not None and not program.large:
        try:
            pair.foreign = replace(pair.foreign, judged=Lockstep().compare(program, pair.rewritten))
        except UnsupportedOp as error:
            pair.foreign = Foreign(error.message)


def _listing(program: Program, modules: Modules) -> str:
    """The first rewritten graph as text."""
    try:
        changed = (m.graph for rank, m in modules.items() if not _is_original(program, rank, m.graph))
        return str(next(changed, ""))
    except Exception:  # noqa: BLE001 - a graph can be too broken to be looked at
        return ""


def _apply_stages(loaded: LoadedPass, ranks: AppliedRanks, modules: Modules, pair: Pair) -> Modules | None:
    """Apply a pass, or the stages of a pipeline, to the modules of some ranks; None if it failed or declined.

    Between stages the graphs are read, so that a finding can name the stage that broke the program; a graph that is
    malformed there ends the pipeline.
    """
    if not loaded.stages:
        return _apply_to_ranks(loaded, modules, pair, pair.original)
    base: Program | None = pair.original
    for number, stage in enumerate(loaded.stages):
        name, last = stage.facts.name, number == len(loaded.stages) - 1
        metadata: Metadata | None = None
        if stage.contract.metadata and not last:
            metadata = {rank: _metadata(module.graph) for rank, module in modules.items()}
        results = _apply_to_ranks(stage, modules, pair, base, name)
        if results is None or last:
            pair.stages.append(Stage(name))
            return results
        modules = results
        for rank, module in modules.items():
            problem = _malformed(module.graph)
            if problem is not None:
                pair.stages.append(Stage(name))
                pair.changed = True
                pair.listing = _listing(pair.original, modules)
                _note(pair, Defect("lint", rank, *problem))
                return None
            if not stage.contract.metadata:
                refresh_metadata(module.graph)
        base = _between(base, ranks, modules, metadata)
        pair.stages.append(Stage(name, base))
    return modules


def _between(base: Program | None, ranks: AppliedRanks, modules: Modules, metadata: Metadata | None) -> Program | None:
    """The program that a stage returned; None if the graphs do not form one.

    Args:
        metadata: of the graphs that the stage was given; None if the metadata of its result was propagated again.
    """
    if base is None:
        return None
    if all(_is_original(base, rank, module.graph) for rank, module in modules.items()) and (
        metadata is None or not any(_metadata_changed(metadata[rank], module.graph) for rank, module in modules.items())
    ):
        return base
    try:
        program = ranks.program_of(base, modules)
        dumps(program)
    except TcverifyError:
        return None
    return program


def _apply_to_ranks(
    loaded: LoadedPass, modules: Modules, pair: Pair, base: Program | None, stage: str | None = None
) -> Modules | None:
    """Apply the pass to each rank's module; None if it failed or declined. Its changes to global state are reverted.

    Args:
        base: the program whose graphs `modules` are, if known.
        stage: the name of the pass, in a pipeline.
    """
    with watch_global_state() as changed:
        results = _results(loaded, modules, pair, base, stage)
    if changed.what:
        _note(pair, Defect("surroundings", 0, f"it {changed}", stage=stage))
    return results


def _results(
    loaded: LoadedPass, modules: Modules, pair: Pair, base: Program | None, stage: str | None
) -> Modules | None:
    results: dict[int, fx.GraphModule] = {}
    rewrites: Counter[str] = Counter(pair.rewrites)
    for rank, module in modules.items():
        given = module.graph
        try:
            returned = _call(loaded, module, rank)
        except Unsupported as error:
            pair.declined = error.message
            return None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a pass raises is a finding about it
            late = late_definition(describe_error(error))
            if late is not None:
                pair.foreign = Foreign(late)
                return None
            pair.failure = PassFailure("pass-raised", describe_error(error), rank, _traceback(error))
            return None
        result = returned_module(returned, module, rank)
        if isinstance(result, Defect):
            pair.defects.append(result)
            return None
        in_place = result is module or result.graph is given
        if not in_place and base is not None and not _is_original(base, rank, given):
            message = "it changed its input graph, although it returned a new one"
            _note(pair, Defect("input-mutated", rank, message, stage=stage))
        rewrites.update(rewrites_of(loaded.subject))
        pair.changed = pair.changed or getattr(loaded.subject, "changed_schedule", False) is True
        for defect in list_reported_defects(loaded.subject):
            _note(pair, replace(defect, rank=rank, stage=stage))
        if rank == 0:
            pair.statistics += decode_statistics(getattr(loaded.subject, "statistics", ()))
        results[rank] = result
    pair.rewrites = dict(rewrites)
    return results


def rewrites_of(subject: Any) -> dict[str, int]:
    """The rewrites that a pass reports for its last call, by pattern."""
    counts = getattr(subject, "rewrites", None)
    return {str(k): v for k, v in counts.items() if isinstance(v, int)} if isinstance(counts, dict) else {}


def list_reported_defects(subject: Any) -> list[Defect]:
    """The defects that a pass reports for its last call. They concern forms of the graph that are not returned."""
    said = getattr(subject, "defects", None)
    return [one for one in said if isinstance(one, Defect)] if isinstance(said, list) else []


def returned_module(returned: Any, module: fx.GraphModule, rank: int) -> fx.GraphModule | Defect:
    """The module that a pass means by its return value; None means the one that it was given."""
    if not isinstance(returned, fx.GraphModule):  # torch.fx.passes' PassResult contains one
        returned = getattr(returned, "graph_module", returned)
    result = module if returned is None else returned
    if isinstance(result, fx.GraphModule):
        return result
    return Defect(
        "return", rank, f"it returned {_brief(result)} for rank {rank}; a pass returns a GraphModule, or None"
    )


def describe_error(error: BaseException) -> str:
    """The first line of an error, with its type."""
    try:
        text = str(error).strip().splitlines()
    except Exception:  # noqa: BLE001 - an exception of the pass can be as broken as the pass
        text = []
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def _traceback(error: BaseException) -> str:
    """The traceback from the first frame of the pass on: the frames of tcverify above it are irrelevant."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("tcverify.application."):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace, limit=-12))


def _brief(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - what a pass returns may not know how to show itself
        return f"a {type(value).__name__}"
    return f"{type(value).__name__} {text}" if len(text) <= 60 else f"a {type(value).__name__}"


def _is_original(program: Program, rank: int, graph: fx.Graph) -> bool:
    """Whether `graph` does what the program does on `rank`; names and metadata aside."""
    binding = program.ranks[rank]
    return same_structure(program.graphs[binding.graph], graph, constants=binding.constants)


def _metadata(graph: fx.Graph) -> Sequence[tuple[Any, ...]]:
    """The metadata that programs keep, node by node. Compare values with `is`: fake tensors define no equality."""
    return [(node.name, node.meta.get("val"), *(node.meta.get(key) for key in KEPT_META)) for node in graph.nodes]


def _metadata_changed(before: Sequence[tuple[Any, ...]], graph: fx.Graph) -> bool:
    """Whether the metadata of a graph is no longer what it was, node by node."""
    rows = zip(before, _metadata(graph), strict=True)
    return any(a is not b for old, new in rows for a, b in zip(old, new, strict=True))


#: Metadata that prescribes what a graph does; other metadata describes it.
_DECLARED = ("after", "comm_buffer")


def _declarations_changed(before: Sequence[tuple[Any, ...]], graph: fx.Graph) -> bool:
    """Whether a graph declares other orders of nodes, or other placements of values in buffers, than before."""
    places = [KEPT_META.index(key) - len(KEPT_META) for key in _DECLARED]
    rows = zip(before, _metadata(graph), strict=True)
    return any(old[place] != new[place] for old, new in rows for place in places)


def _inspect(pair: Pair, modules: Modules, metadata: Metadata, deep: bool) -> bool:
    """Judge each returned graph module as FX does. Ranks with equal graphs, before and after, are judged once.

    Args:
        metadata: of the graphs that the pass was given.

    Returns:
        Whether the pass changed anything, including metadata.
    """
    touched = False
    judged: list[tuple[int, fx.Graph]] = []
    for rank, module in modules.items():
        if _is_original(pair.original, rank, module.graph):
            touched = touched or _metadata_changed(metadata[rank], module.graph)
            pair.changed = pair.changed or _declarations_changed(metadata[rank], module.graph)
            continue
        touched = pair.changed = True
        origin = pair.original.ranks[rank].graph
        if any(origin == known and same_structure(module.graph, other, integers=False) for known, other in judged):
            continue
        judged.append((origin, module.graph))
        for defect in defects_of(signature(pair.original.graphs[origin]), module.graph, rank, module if deep else None):
            _note(pair, defect)
    return touched


def _note(pair: Pair, defect: Defect) -> None:
    """Keep the first defect of each aspect: those of other ranks are the same."""
    if all(known.aspect != defect.aspect for known in pair.defects):
        pair.defects.append(defect)


def defects_of(takes: str, graph: fx.Graph, rank: int, module: fx.GraphModule | None = None) -> list[Defect]:
    """What prevents a rewritten graph from replacing the original.

    Args:
        takes: the signature of the original; see `signature`.
        module: the owner of the graph: its generated code is traced and compared as well.
    """
    malformed = _malformed(graph)
    if malformed is not None:
        return [Defect("lint", rank, *malformed)]
    after = signature(graph)
    if takes != after:
        return [Defect("signature", rank, f"the original {takes}, the rewritten graph {after}")]
    try:
        code = graph.python_code("self").src
        compile(code, "<rewritten graph>", "exec")
        if module is not None:
            module.recompile()
            if all(map(_traceable, graph.nodes)) and not same_structure(graph, fx.Tracer().trace(module)):
                return [Defect("code", rank, "its generated Python code does not trace to the same graph")]
    except Exception as error:  # noqa: BLE001 - code generation fails in as many ways as there are graphs
        return [Defect("code", rank, f"its generated Python code does not work: {describe_error(error)}")]
    return []


def _malformed(graph: fx.Graph) -> tuple[str, str | None] | None:
    """Why it is not a legal FX graph, and the node to blame; None if it is legal."""
    stray = _use_before_definition(graph)
    if stray is not None:
        return stray
    try:
        graph.lint()
    except Exception as error:  # noqa: BLE001 - lint reports by raising, whatever type it likes
        return describe_error(error), None
    return None


def _traceable(node: fx.Node) -> bool:
    """Whether tracing the node's code gives the node again: not for calls that tracing executes, enters or reorders."""
    if node.op in ("placeholder", "output"):
        return True
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        return True
    return qualified_name(node.target).startswith("python::") and isinstance(node.args[0], fx.Node)


def _use_before_definition(graph: fx.Graph) -> tuple[str, str] | None:
    seen: set[fx.Node] = set()
    last: fx.Node | None = None
    for node in graph.nodes:
        if last is not None:
            return f"node '{node.name}' is after the output, where it never runs", node.name
        last = node if node.op == "output" else None
        for operand in node.all_input_nodes:
            if operand.graph is not graph:
                return f"node '{node.name}' reads '{operand.name}', which belongs to another graph", node.name
            if operand not in seen:
                return f"node '{node.name}' reads '{operand.name}', which is not defined before it", node.name
        seen.add(node)
    return None


def signature(graph: fx.Graph) -> str:
    """What a graph takes and returns, as text."""
    takes = ", ".join(str(n.target) for n in graph.nodes if n.op == "placeholder")
    outputs = [n for n in graph.nodes if n.op == "output"]
    if len(outputs) != 1:
        return f"takes ({takes}) and has {len(outputs)} outputs"
    _, tree = pytree.tree_flatten(fx.node.map_aggregate(outputs[0].args[0], lambda x: "*"))
    return f"takes ({takes}) and returns {tree.num_leaves} values as {tree}"


def _program_of(program: Program, ranks: AppliedRanks, modules: Modules, pair: Pair) -> Program | None:
    try:
        rewritten = ranks.program_of(program, modules)
        dumps(rewritten)
    except RanksDiffer:
        raise
    except NotSerialisable as error:
        pair.foreign = Foreign(error.message)
        if ranks.samples:
            raise RanksDiffer from None
        try:
            return program.with_graphs([module.graph for module in modules.values()], list(modules.values()))
        except TcverifyError as second:
            pair.defects.append(Defect("signature", 0, second.message))
    except TcverifyError as error:
        pair.defects.append(Defect("signature", 0, error.message))
    except Exception as error:  # noqa: BLE001 - metadata can be of any kind
        pair.defects.append(Defect("lint", 0, f"it cannot be read: {describe_error(error)}"))
    else:
        return rewritten
    return None


def _look_for_impurity(loaded: LoadedPass, program: Program, ranks: AppliedRanks, modules: Modules, pair: Pair) -> None:
    """Apply the pass again: to fresh graphs, and to copies of its own results."""
    graphs = {rank: module.graph for rank, module in modules.items()}
    scratch = Pair(program)
    repeated = _apply_stages(loaded, ranks, ranks.modules(program), scratch)
    message = "two applications to the same graph give different results"
    if repeated is None:
        pair.defects.append(Defect("unrepeatable", 0, message + _excuse(scratch)))
        return
    for rank, graph in graphs.items():
        if not same_structure(graph, repeated[rank].graph):
            pair.defects.append(Defect("unrepeatable", rank, message + tell_apart(graph, repeated[rank].graph)))
            return
    if pair.foreign is not None or pair.rewritten is None:
        return
    scratch = Pair(pair.rewritten)
    again = _apply_stages(loaded, ranks, ranks.modules(pair.rewritten), scratch)
    if again is None:
        if scratch.declined is None:
            message = "applied to its own result, it fails"
            pair.defects.append(Defect("second-application", 0, message + _excuse(scratch)))
        return
    if all(same_structure(graph, again[rank].graph) for rank, graph in graphs.items()):
        return
    if loaded.contract.idempotent:
        pair.defects.append(
            Defect("not-idempotent", 0, "it promises idempotence, but its second application changes the graph")
        )
    scratch = Pair(program)
    made = _program_of(program, ranks, again, scratch)
    if scratch.defects:
        message = "applied to its own result, it returns a graph that cannot run"
        pair.defects.append(Defect("second-application", 0, message + _excuse(scratch)))
    pair.again = made if scratch.foreign is None else None


#: Longest text of a call in a message.
_CALL = 120


def tell_apart(first: fx.Graph, second: fx.Graph) -> str:
    """Say where two results of a pass differ first: in a call, or else in the name or the metadata of a node."""
    found = first_difference(first, second)
    if found is not None:
        one, other = map(_call_text, found)
        return f": the first one has {one} where the second one has {other}"
    for a, b, mine, theirs in zip(first.nodes, second.nodes, describe(first), describe(second), strict=False):
        if a.name != b.name:
            return f": the first one names {a.name} what the second one names {b.name}"
        for key in sorted(mine.keys() | theirs.keys()):
            if mine.get(key) != theirs.get(key):
                told = (
                    f"meta[{key!r}] of {a.name}: {mine.get(key)} in the first one, {theirs.get(key)} in the second one"
                )
                return f": they differ in {told}"
    return ""


def _call_text(node: fx.Node) -> str:
    name = qualified_name(node.target) if node.op == "call_function" else str(node.target)
    call = f"{node.name} = {name.rpartition('::')[2]}({', '.join(map(str, node.args))})"
    text = f"return {node.args[0]}" if node.op == "output" else call
    return text if len(text) <= _CALL else f"{text[:_CALL]} …"


def _excuse(scratch: Pair) -> str:
    if scratch.failure is not None:
        return f": {scratch.failure.message}"
    return f": {scratch.defects[0].message}" if scratch.defects else ""


__all__ = [
    "apply_counted", "apply_pass", "defects_of", "describe_error", "returned_module", "rewrites_of", "signature",
    "tell_apart",
]  # fmt: skip
