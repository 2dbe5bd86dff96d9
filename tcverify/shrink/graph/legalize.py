"""Turns an edit into a legal program.

Every call is inferred again from its operands, so that misfits are refused without a trial, and correct metadata
stays correct. Missing or wrong metadata stays so: the finding may need it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from torch.fx.node import map_aggregate

from tcverify.errors import ProgramError, TcverifyError, UnsupportedOp
from tcverify.ops import ShapeError, TensorSpec, infer
from tcverify.ops.leaves import leaves
from tcverify.program import InputSpec, RankBinding, RankConstant
from tcverify.program.graph import constant_value, map_structure
from tcverify.program.specs import same_layout
from tcverify.shrink.graph.sketch import Graph, Ref, Sketch, SketchStep, live_names
from tcverify.shrink.graph.static_shapes import refit_call
from tcverify.shrink.graph.step_facts import FOLLOWS, NOTHING, RIGHT, UNKNOWN, WRONG, Facts, Typing


def facts_of(sketch: Sketch) -> Facts:
    """Infer the results of the steps of an unedited program."""
    typings = []
    for number, graph in enumerate(sketch.graphs):
        members = [rank for rank, binding in enumerate(sketch.ranks) if binding.graph == number]
        fitter = _Fitter(sketch, members[0] if members else 0, None)
        for step in graph:
            fitter.add(step)
        typings.append(fitter.typing())
    return Facts(sketch, tuple(typings))


def legalize_edit(facts: Facts, sketch: Sketch, prefer: str = "first") -> Facts | None:
    """Turn an edit of `facts.sketch` into a legal program, or return None.

    Steps that the edit left unused are removed; ranks whose shapes now differ get separate graphs; static shapes in views
    follow their operands; metadata is renewed. Calls without a result are returned only where they were before.

    Args:
        sketch: the edit; its graphs correspond to those of `facts.sketch`, and further ones to the last of these.
        prefer: which of several dims of a view gives way, the "first" or the "last".
    """
    try:
        sketch = _named(_pruned(facts, sketch), facts.names)
        graphs: list[Graph] = []
        typings: list[Typing] = []
        bindings: dict[int, RankBinding] = {}
        for number, ranks in _classes(sketch):
            constants = sketch.ranks[ranks[0]].constants
            fitter = _Fitter(sketch, ranks[0], facts.typings[min(number, len(facts.typings) - 1)], prefer)
            for step in sketch.graphs[number]:
                if not fitter.knows(step.reads) or not fitter.add(step):
                    return None
            steps = tuple(fitter.steps)
            if steps not in graphs or any(sketch.modules):
                graphs.append(steps)
                typings.append(fitter.typing())
                index = len(graphs) - 1
            else:
                index = graphs.index(steps)
            needed = constants_of(steps)
            for rank in ranks:
                constants = {k: v for k, v in sketch.ranks[rank].constants.items() if k in needed}
                bindings[rank] = RankBinding(index, constants)
    except (TcverifyError, ValueError, TypeError, IndexError):
        return None  # the arguments of a malformed program do not fit torch's op
    returned = {name for graph in facts.sketch.graphs for name in graph[-1].reads}
    for graph, typing in zip(graphs, typings, strict=True):
        if any(typing.real[name] is None for name in graph[-1].reads if name not in returned):
            return None  # nothing comes of a call that has no result
    bound = tuple(bindings[rank] for rank in range(len(sketch.ranks)))
    modules = sketch.modules if len(sketch.modules) == len(graphs) else ()
    if any(sketch.modules) and not modules:
        return None
    return Facts(replace(sketch, graphs=tuple(graphs), ranks=bound, modules=modules), tuple(typings))


def _pruned(facts: Facts, sketch: Sketch) -> Sketch:
    """Drop what the edit has left without a reader; what had none before stays, and collectives where ranks differ."""
    lives = []
    differ = not facts.aligned or len(sketch.graphs) > len(facts.steps)
    for number, graph in enumerate(sketch.graphs):
        counterpart = min(number, len(facts.steps) - 1)
        before, live_before = facts.steps[counterpart], facts.live[counterpart]

        def keep(step: SketchStep, before: Any = before, live_before: Any = live_before) -> bool:
            if step.effect or (step.name in before and step.name not in live_before):
                return True
            return step.collective and differ

        lives.append(live_names(graph, keep))
    somewhere = set().union(*lives)
    graphs = tuple(
        tuple(s for s in graph if s.name in live or (s.op == "placeholder" and s.name in somewhere))
        for graph, live in zip(sketch.graphs, lives, strict=True)
    )
    placed = {step.name for graph in graphs for step in graph if step.op == "placeholder"}
    return replace(sketch, graphs=graphs, inputs=tuple(spec for spec in sketch.inputs if spec.name in placed))


def _named(sketch: Sketch, taken: set[str]) -> Sketch:
    """Give the inputs that an edit has added their names: v0, v1, …"""
    new = [spec.name for spec in sketch.inputs if not spec.name.isidentifier()]
    if not new:
        return sketch
    free = (name for i in itertools.count() if (name := f"v{i}") not in taken)
    names = {name: next(free) for name in new}

    def leaf(value: Any) -> Any:
        return Ref(names[value.name]) if isinstance(value, Ref) and value.name in names else value

    def renamed(step: SketchStep) -> SketchStep:
        if step.name in names:
            return replace(step, name=names[step.name], target=names[step.name])
        return step.mapped(leaf) if any(name in names for name in step.reads) else step

    graphs = tuple(tuple(renamed(step) for step in graph) for graph in sketch.graphs)
    inputs = tuple(replace(spec, name=names.get(spec.name, spec.name)) for spec in sketch.inputs)
    return replace(sketch, graphs=graphs, inputs=inputs)


def _classes(sketch: Sketch) -> list[tuple[int, list[int]]]:
    """Each graph with ranks that run it on inputs of the same shapes."""
    specs = {spec.name: spec for spec in sketch.inputs}
    used = [[specs[step.name] for step in graph if step.op == "placeholder"] for graph in sketch.graphs]
    classes: dict[Any, list[int]] = {}
    for rank, binding in enumerate(sketch.ranks):
        shapes = tuple(spec.local_shape(sketch.mesh, rank) for spec in used[binding.graph])
        lengths = tuple(len(v) if isinstance(v, (list, tuple)) else -1 for v in binding.constants.values())
        classes.setdefault((binding.graph, shapes, lengths), []).append(rank)
    return [(key[0], ranks) for key, ranks in classes.items()]


def constants_of(graph: Graph) -> set[str]:
    """The names of the rank constants in a graph."""
    return {constant.name for step in graph for constant in leaves((step.args, step.kwargs), RankConstant)}


class _Fitter:
    """Infers the steps of one graph in order.

    Args:
        rank: one that runs the graph.
        before: the typing of the graph that was edited; None to infer it.
    """

    def __init__(self, sketch: Sketch, rank: int, before: Typing | None, prefer: str = "first") -> None:
        self.steps: list[SketchStep] = []
        self._specs: Mapping[str, InputSpec] = {spec.name: spec for spec in sketch.inputs}
        self._mesh, self._rank = sketch.mesh, rank
        self._constants = sketch.ranks[rank].constants if sketch.ranks else {}
        self._finding_out = before is None
        self._before = before or NOTHING
        self._prefer = prefer
        self._real: dict[str, Any] = {}
        self._recorded: dict[str, Any] = {}
        self._records: dict[str, str] = {}
        self._misfits: set[str] = set()
        self._fresh = itertools.count().__next__
        self._meaning: dict[int, int] = {}  # recorded storage -> the real one
        self._numbers: dict[int, int] = {}  # storage -> the number that is written

    def typing(self) -> Typing:
        return Typing(self._real, self._records, frozenset(self._misfits))

    def knows(self, names: Iterable[str]) -> bool:
        """Whether these steps have been taken: on another rank, what a step is to read may be missing."""
        return all(name in self._real for name in names)

    def add(self, step: SketchStep) -> bool:
        """Take the next step; returns whether its operands fit together, or did not before."""
        if step.op == "output":
            self.steps.append(step)
            return True
        real: Any = UNKNOWN
        if step.op == "placeholder" and step.name in self._specs:
            spec = self._specs[step.name]
            plain = TensorSpec.contiguous(spec.local_shape(self._mesh, self._rank), spec.dtype)
            real = plain.stored(self._fresh())
        elif step.op == "call_function":
            step = self._refitted(step)
            try:
                real = self._infer(step, self._real)
            except (ShapeError, ProgramError):
                if not self._finding_out and step.name not in self._before.misfits:
                    return False
                self._misfits.add(step.name)
            except UnsupportedOp:
                pass
        recorded = step.meta.get("val", UNKNOWN)
        if real is UNKNOWN and recorded is not UNKNOWN:
            real = map_structure(self._own, recorded)
        self._real[step.name] = real
        self.steps.append(self._record(step, real, recorded))
        return True

    def _infer(self, step: SketchStep, known: Mapping[str, Any]) -> Any:
        if any(known.get(name, UNKNOWN) is UNKNOWN for name in step.reads):
            return UNKNOWN

        def leaf(value: Any) -> Any:
            if isinstance(value, Ref):
                return known[value.name]
            return constant_value(value, self._constants) if isinstance(value, RankConstant) else value

        args, kwargs = map_aggregate(step.args, leaf), dict(map_aggregate(step.kwargs, leaf))
        return infer(step.target, args, kwargs, self._fresh, self._mesh.groups(self._rank))

    def _refitted(self, step: SketchStep) -> SketchStep:
        first = step.args[0] if step.args else None
        if not isinstance(first, Ref):
            return step
        old, new = self._before.real.get(first.name), self._real.get(first.name)
        if not isinstance(old, TensorSpec) or not isinstance(new, TensorSpec) or old.shape == new.shape:
            return step
        return refit_call(step, old.shape, self._before.real.get(step.name), new.shape, self._prefer)

    def _own(self, spec: Any) -> Any:
        return spec.stored(self._fresh()) if isinstance(spec, TensorSpec) else spec

    def _record(self, step: SketchStep, real: Any, recorded: Any) -> SketchStep:
        """Return the step with its metadata renewed; while finding out, see how the metadata relates to what is real."""
        if self._finding_out:
            if recorded is not UNKNOWN:
                self._recorded[step.name] = recorded
                self._records[step.name] = self._judge(step, real, recorded)
            return step
        kind = self._before.records.get(step.name)
        if kind is None and (step.name in self._before.real or real is UNKNOWN):
            return step  # it came without a record
        self._records[step.name] = kind = kind or RIGHT
        said = real
        if kind == FOLLOWS:
            try:
                said = self._infer(step, self._recorded)
            except (ShapeError, UnsupportedOp, ProgramError):
                said = UNKNOWN
        if kind == WRONG or said is UNKNOWN:
            said = map_structure(self._kept, recorded)
        else:
            self._note(recorded, said)
        self._recorded[step.name] = said
        meta = {**step.meta, "val": map_structure(self._numbered(recorded), said)}
        return replace(step, meta=meta)

    def _judge(self, step: SketchStep, real: Any, recorded: Any) -> str:
        if same_layout(recorded, real) and self._note(recorded, real):
            return RIGHT
        try:
            implied = UNKNOWN if step.op != "call_function" else self._infer(step, self._recorded)
        except (ShapeError, UnsupportedOp, ProgramError):
            return WRONG
        return FOLLOWS if implied is not UNKNOWN and same_layout(recorded, implied) else WRONG

    def _note(self, recorded: Any, real: Any) -> bool:
        """Note which real storage a recorded one means; returns whether it means no other already."""
        fits = True
        for said, one in zip(leaves(recorded, TensorSpec), leaves(real, TensorSpec), strict=False):
            if said.alias is not None and one.alias is not None:
                fits = self._meaning.setdefault(said.alias, one.alias) == one.alias and fits
        return fits

    def _kept(self, spec: Any) -> Any:
        """A wrong record, in the storage that others now have under its number."""
        if not isinstance(spec, TensorSpec) or spec.alias is None:
            return spec
        return spec.stored(self._meaning.setdefault(spec.alias, self._fresh()))

    def _numbered(self, recorded: Any) -> Callable[[Any], Any]:
        """Storages are numbered in order of appearance; metadata without storage stays without."""
        nameless = isinstance(recorded, TensorSpec) and recorded.alias is None

        def number(spec: Any) -> Any:
            if not isinstance(spec, TensorSpec):
                return spec
            if nameless or spec.alias is None:
                return spec.stored(None)
            return spec.stored(self._numbers.setdefault(spec.alias, len(self._numbers)))

        return number


__all__ = ["constants_of", "facts_of", "legalize_edit"]
