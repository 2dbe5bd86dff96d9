"""A program in the form in which it is edited: immutable steps that name what they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError
from tcverify.ops import lookup, schema_of
from tcverify.ops.leaves import leaves
from tcverify.program import InputSpec, Mesh, Options, Program, RankBinding, StreamSettings
from tcverify.program.graph import KEPT_META, add_node
from tcverify.registry.choices import SizesName


@dataclass(frozen=True, slots=True)
class Ref:
    """Placeholder in arguments for the value of the step of this name."""

    name: str


#: The metadata that names steps which must run before, by name in graphs and by reference in sketches.
AFTER = "after"

#: Metadata that names no other step.
_PLAIN_META = frozenset({"val", "cost_s", "schedule"})


@dataclass(frozen=True)
class SketchStep:
    """One node of a graph, including placeholders and output. Derived properties are cached.

    Attributes:
        meta: its metadata, "val" included.
    """

    name: str
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    meta: dict[str, Any] = field(default_factory=dict)
    type: Any = None

    @property
    def calls(self) -> bool:
        """Whether it is a call; a selection of one result of several counts as one."""
        return self.op.startswith("call")

    @property
    def selects(self) -> bool:
        """Whether it selects one result of several, or indexes a tensor."""
        return self.calls and getattr(self.target, "__name__", "") == "getitem"

    @cached_property
    def collective(self) -> bool:
        return self.op == "call_function" and lookup(self.target).collective

    @cached_property
    def effect(self) -> bool:
        """Whether it may do something besides returning a value; for unknown ops, nothing is known."""
        if self.op == "call_function" and isinstance(self.target, torch._ops.OpOverload):
            schema = schema_of(self.target)
            return lookup(self.target).effect or bool(schema is not None and schema.is_mutable)
        return self.op in ("call_method", "call_module") or (
            self.op == "call_function" and lookup(self.target).run is None
        )

    @cached_property
    def reads(self) -> list[str]:
        """The names of the steps that it reads, in the order of its arguments."""
        return refs((self.args, self.kwargs))

    @property
    def after(self) -> list[str]:
        """The names of the steps that must run before it, as its metadata says."""
        return refs(self.meta.get(AFTER, ()))

    def mapped(self, leaf: Callable[[Any], Any]) -> SketchStep:
        """Return the step with `leaf` applied to every leaf of its arguments and of metadata that may name steps."""
        args, kwargs = map_aggregate(self.args, leaf), map_aggregate(self.kwargs, leaf)
        meta = {key: value if key in _PLAIN_META else map_aggregate(value, leaf) for key, value in self.meta.items()}
        return replace(self, args=args, kwargs=dict(kwargs), meta=meta)


Graph = tuple[SketchStep, ...]

#: What is read in place of a step: an earlier step (which may be replaced itself), an input to be added, or None where nobody
#: reads it.
Replacements = Mapping[str, "Ref | InputSpec | None"]


@dataclass(frozen=True, slots=True)
class Sketch:
    """A program whose graphs are tuples of steps; else as `Program`."""

    mesh: Mesh
    graphs: tuple[Graph, ...]
    ranks: tuple[RankBinding, ...]
    inputs: tuple[InputSpec, ...]
    seed: int
    labels: tuple[str, ...]
    modules: tuple[torch.nn.Module | None, ...]
    streams: StreamSettings | None = None
    options: Options = field(default_factory=dict)
    sizes: SizesName = "auto"


def refs(value: Any) -> list[str]:
    """The names that an argument refers to, each once, in order."""
    return list(dict.fromkeys(ref.name for ref in leaves(value, Ref)))


def sketch_of(program: Program) -> Sketch:
    """Write a program as a sketch."""
    return Sketch(
        program.mesh,
        tuple(tuple(_step(node) for node in graph.nodes) for graph in program.graphs),
        program.ranks,
        program.inputs,
        program.seed,
        program.labels,
        program.modules,
        program.streams,
        program.options,
        program.sizes,
    )


def _step(node: fx.Node) -> SketchStep:
    def leaf(value: Any) -> Any:
        return Ref(value.name) if isinstance(value, fx.Node) else value

    meta = {key: map_aggregate(node.meta[key], leaf) for key in KEPT_META if key in node.meta}
    if AFTER in meta:
        meta[AFTER] = tuple(Ref(name) for name in node.meta[AFTER])
    if "val" in node.meta:
        meta["val"] = node.meta["val"]
    kwargs = dict(map_aggregate(node.kwargs, leaf))
    return SketchStep(node.name, node.op, node.target, map_aggregate(node.args, leaf), kwargs, meta, node.type)


def program_of(sketch: Sketch) -> Program:
    """Build the program. Raises ProgramError where its parts do not fit together."""
    graphs = tuple(_graph(steps) for steps in sketch.graphs)
    parts = sketch.mesh, graphs, sketch.ranks, sketch.inputs, sketch.seed, sketch.labels, sketch.modules
    return Program(*parts, streams=sketch.streams, options=sketch.options, sizes=sketch.sizes)


def _graph(steps: Graph) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def leaf(value: Any) -> Any:
        return nodes[value.name] if isinstance(value, Ref) else value

    def known(value: Any) -> Any:
        return nodes.get(value.name) if isinstance(value, Ref) else value  # metadata may name what is gone

    for step in steps:
        args, kwargs = map_aggregate(step.args, leaf), dict(map_aggregate(step.kwargs, leaf))
        node = nodes[step.name] = add_node(graph, step.op, step.target, args, kwargs, step.name)
        if node.name != step.name:
            raise ProgramError(f"'{step.name}' cannot be the name of a node")
        node.type = step.type
        node.meta = {
            key: value if key == "val" else map_aggregate(value, known)
            for key, value in step.meta.items()
            if key != AFTER
        }
        before = [nodes[name].name for name in step.after if name in nodes and nodes[name].op.startswith("call")]
        if before:
            node.meta[AFTER] = before
    return graph


def live_names(graph: Graph, keep: Callable[[SketchStep], bool]) -> set[str]:
    """The steps that the output needs, and those that `keep` says, with what they need."""
    live: set[str] = set()
    for step in reversed(graph):
        if step.op == "output" or step.name in live or keep(step):
            live.add(step.name)
            live.update(step.reads)
    return live


def _replaced(graph: Graph, mapping: Replacements) -> Graph:
    final: dict[str, str | None] = {}
    added: list[SketchStep] = []
    for step in graph:
        if step.name not in mapping:
            continue
        new = mapping[step.name]
        if isinstance(new, InputSpec):
            final[step.name] = new.name
            added.append(SketchStep(new.name, "placeholder", new.name, ()))
        else:
            final[step.name] = None if new is None else final.get(new.name, new.name)
    if not final:
        return graph

    def leaf(value: Any) -> Any:
        if not isinstance(value, Ref) or value.name not in final:
            return value
        name = final[value.name]
        return None if name is None else Ref(name)

    kept = [step for step in graph if step.name not in final]
    first = sum(step.op == "placeholder" for step in kept)
    changed = [
        step.mapped(leaf) if any(name in final for name in (*step.reads, *step.after)) else step for step in kept
    ]
    return (*changed[:first], *added, *changed[first:])


def result_of(graph: Graph) -> Any:
    """What the output returns."""
    last = graph[-1]
    return last.args[0] if last.op == "output" and last.args else ()


def with_result(graph: Graph, result: Any) -> Graph:
    """Return the graph with another result."""
    return (*graph[:-1], replace(graph[-1], args=(result,)))


def replace_steps(sketch: Sketch, mapping: Replacements, graphs: Sequence[int] | None = None) -> Sketch:
    """Return the sketch without the steps that `mapping` names, in all graphs or in some."""
    new = tuple(
        _replaced(graph, mapping) if graphs is None or i in graphs else graph for i, graph in enumerate(sketch.graphs)
    )
    added = [spec for spec in mapping.values() if isinstance(spec, InputSpec)]
    return replace(sketch, graphs=new, inputs=(*sketch.inputs, *added))


def with_results(sketch: Sketch, result: Callable[[int, Any], Any]) -> Sketch:
    """Return the sketch in which graph i returns `result(i, what it returns)`."""
    graphs = (with_result(graph, result(i, result_of(graph))) for i, graph in enumerate(sketch.graphs))
    return replace(sketch, graphs=tuple(graphs))


__all__ = [
    "AFTER", "Graph", "Ref", "Replacements", "Sketch", "SketchStep", "live_names", "program_of", "refs", "replace_steps",
    "result_of", "sketch_of", "with_result", "with_results",
]  # fmt: skip
