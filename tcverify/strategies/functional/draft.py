"""An asynchronous program under construction: steps in execution order, typed on every rank, with the collectives in flight.

What a call writes into, and what is in flight while it runs, depends on its position. Every call is checked against that as soon
as it is added, so that programs are free of races by construction. Steps are not edited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from tcverify.ops import TensorSpec, lookup, mutated, resolve, schema_of
from tcverify.ops.leaves import leaves
from tcverify.program import GraphBuilder, InputSpec, Program, RankBinding
from tcverify.program.graph import add_node
from tcverify.program.specs import storages_of
from tcverify.strategies.draft import DraftStep, DraftValue, NoSite, PerRank, ProgramDraft


@dataclass(frozen=True, slots=True)
class Flight:
    """A collective in flight: the storages that it may read, and those that it may write into."""

    reads: frozenset[int]
    writes: frozenset[int]


@dataclass(slots=True)
class AsyncDraft(ProgramDraft):
    """Collects inputs and steps.

    Attributes:
        writes: whether calls may write into values.
        effects: whether calls may have side effects, as sends and barriers have.
        flying: the collectives that were started and not waited for, by number.
        swaps: pairs of steps that are swapped on some ranks.
        instead: (step, operand, other value): what a step reads in place of its operand on some ranks.
        after: (number, number): the first step names the second in `meta["after"]`.
        dead: steps that are kept although they are unused.
    """

    writes: bool = True
    effects: bool = True
    flying: dict[int, Flight] = field(default_factory=dict)
    swaps: list[tuple[int, int, frozenset[int]]] = field(default_factory=list)
    instead: list[tuple[int, int, int, frozenset[int]]] = field(default_factory=list)
    after: list[tuple[int, int]] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._classes = [[rank] for rank in range(self.mesh.world_size)]

    def _classify(self) -> None:
        """Rank constants may change shapes here: every rank is a class of its own."""

    # ------------------------------------------------------------------------------------------------------ writing

    def input(self, *args: Any, **kwargs: Any) -> DraftValue:
        made = ProgramDraft.input(self, *args, **kwargs)
        self.specs(made)
        return made

    def call(self, op: str, *args: Any, **kwargs: Any) -> DraftValue:
        """Add a call of `op`.

        Raises:
            NoSite: some rank cannot run it, the members of a group would not agree, or it conflicts with a collective in flight.
        """
        if op != "getitem" and not self._allows(resolve(op)):
            raise NoSite
        return self.typed_call(op, *args, **kwargs)

    def _allows(self, target: Any) -> bool:
        """Whether calls of an op are among those that the program may have."""
        meaning = lookup(target)
        if meaning.phase == "wait" or (self.writes and self.effects):
            return True
        schema = schema_of(target)
        if schema is None or (schema.is_mutable and not self.writes):
            return False
        blocks = meaning.collective and meaning.phase is None
        return self.effects or not (meaning.effect or blocks)

    def _admit(self, number: int) -> None:
        step = self._step(number)
        if step.op == "getitem":
            return
        target = resolve(step.op)
        meaning = lookup(target)
        if meaning.phase == "wait":
            self._land(leaves((step.args, step.kwargs), DraftValue)[0])
            return
        made = set(storages_of(self._specs[number][0]))
        read, written = self._touched(target, step)
        views = not written and made <= read and not meaning.collective
        if not views and any(self._disturbs(flight, read, written) for flight in self.flying.values()):
            raise NoSite
        if meaning.phase == "start":
            reads = frozenset() if meaning.copies else frozenset(read)
            self.flying[number] = Flight(reads, frozenset(made | written))

    def _touched(self, target: Any, step: DraftStep) -> tuple[set[int], set[int]]:
        """The storages of the operands, and those among them that the call writes into."""
        written = self._stored(mutated(target, step.args, step.kwargs, DraftValue))
        return set().union(*[storages_of(self._specs[n][0]) for n in step.reads]), written

    @staticmethod
    def _disturbs(flight: Flight, read: set[int], written: set[int]) -> bool:
        return bool(read & flight.writes or written & (flight.reads | flight.writes))

    def _land(self, value: DraftValue) -> None:
        """The collectives that write into the storage of a value have arrived there."""
        own = self._stored([value])
        left = {number: Flight(flight.reads, flight.writes - own) for number, flight in self.flying.items()}
        self.flying = {number: flight for number, flight in left.items() if flight.writes}

    def _stored(self, values: Iterable[DraftValue]) -> set[int]:
        """The numbers of the storages of values, which are those of all ranks."""
        return set().union(*[storages_of(self._specs[value.number][0]) for value in values])

    def _step(self, number: int) -> DraftStep:
        found = self._makers[number]
        assert isinstance(found, DraftStep)
        return found

    def state(self) -> Any:
        return len(self), self.flying.copy(), len(self.swaps), len(self.instead), len(self.after)

    def restore(self, state: Any) -> None:
        """Drop later additions: without copies of the whole state, since drafts may be large."""
        length, self.flying, swaps, instead, after = state
        for number in range(length, len(self)):
            del self._specs[number]
        for maker in self._makers[length:]:
            if isinstance(maker, InputSpec):
                self._names.discard(self._inputs.pop().name)
        del self._makers[length:], self.swaps[swaps:], self.instead[instead:], self.after[after:]
        self.dead = {number for number in self.dead if number < length}

    # ------------------------------------------------------------------------------------------------------- typing

    def elements(self, value: DraftValue) -> int:
        """Elements on the rank that has most."""
        return max(spec.numel for spec in leaves(self.specs(value), TensorSpec))

    def same_type(self, a: DraftValue, b: DraftValue) -> bool:
        """Whether two values have one shape and dtype on every rank."""
        return all(
            isinstance(one, TensorSpec) and (one.shape, one.dtype) == (getattr(other, "shape", None), other.dtype)
            for one, other in zip(self._specs[a.number], self._specs[b.number], strict=True)
        )

    def readable(self, value: DraftValue) -> bool:
        """Whether no collective in flight writes into the value."""
        own = self._stored([value])
        return not any(own & flight.writes for flight in self.flying.values())

    def writable(self, value: DraftValue) -> bool:
        """Whether no collective in flight reads the value or writes into it."""
        own = self._stored([value])
        return self.writes and not any(own & (flight.writes | flight.reads) for flight in self.flying.values())

    # ------------------------------------------------------------------------------------------------------ reading

    def _numbered(self) -> list[tuple[int, DraftStep]]:
        return [(number, maker) for number, maker in enumerate(self._makers) if isinstance(maker, DraftStep)]

    def calls(self) -> list[int]:
        """Numbers of the calls that all ranks run, without selections of results."""
        return [number for number, step in self._numbered() if step.only is None and step.op != "getitem"]

    def blocking(self) -> set[int]:
        """Numbers of the collectives that block and return something."""
        found = {number: lookup(resolve(self._step(number).op)) for number in self.calls()}
        return {number for number, op in found.items() if op.collective and op.phase is None and not op.effect}

    def unread(self) -> list[DraftValue]:
        """Results of calls on all ranks that are unused, without inputs and dead code, newest first. Writes have no results."""
        read = {number for _, step in self._numbered() if step.only is None for number in step.reads}
        found = []
        for number, step in self._numbered():
            specs = self._specs[number]
            if number not in read | self.dead and all(isinstance(spec, TensorSpec) for spec in specs):
                schema = None if step.op == "getitem" else schema_of(resolve(step.op))
                if schema is None or not schema.is_mutable or step.op.endswith("wait_tensor"):
                    found.append(DraftValue(number, specs[0].dtype, rms=0.6))
        return found[::-1]

    def sent_by_some(self) -> list[DraftValue]:
        """Values that only some ranks read: they must be kept on the others too, or those would drop the steps that
        compute them."""
        numbers = dict.fromkeys(n for _, step in self._numbered() if step.only is not None for n in step.reads)
        return [DraftValue(number) for number in numbers]

    # ----------------------------------------------------------------------------------------------------- building

    def program(self, result: Any, seed: int, labels: Iterable[str]) -> Program:
        """Build the program that returns `result`. Ranks with equal steps and shapes share a graph."""
        constants = self._constants()
        names = self._node_names()
        layouts = list(zip(*[_layouts_by_rank(self._specs[number]) for number in range(len(self))], strict=True))
        classes: dict[Any, int] = {}
        graphs: list[fx.Graph] = []
        bindings = []
        for rank in range(self.mesh.world_size):
            order = self._order_on(rank)
            instead = {(step, operand): other for step, operand, other, ranks in self.instead if rank in ranks}
            key = order, layouts[rank], tuple(instead)
            if key not in classes:
                classes[key] = len(graphs)
                graphs.append(self._graph(rank, order, instead, result, names))
            bindings.append(RankBinding(classes[key], {name: of(rank) for name, of in constants.items()}))
        inputs = tuple(self._inputs)
        return Program(self.mesh, tuple(graphs), tuple(bindings), inputs, seed, tuple(dict.fromkeys(labels)))

    def _order_on(self, rank: int) -> tuple[int, ...]:
        """Numbers of a rank's inputs, then of its steps in its order."""
        order = list(range(len(self)))
        for first, second, ranks in self.swaps:
            if rank in ranks:
                order[first], order[second] = order[second], order[first]
        inputs, steps = [], []
        for number in order:
            maker = self._makers[number]
            if isinstance(maker, InputSpec):
                inputs.append(number)
            elif maker.only is None or rank in maker.only:
                steps.append(number)
        return (*inputs, *steps)

    def _constants(self) -> dict[str, Callable[[int], Any]]:
        found = [arg for _, step in self._numbered() for arg in leaves((step.args, step.kwargs), PerRank)]
        return {constant.name: constant.of for constant in found}

    def _node_names(self) -> dict[int, str]:
        """Names of steps, the same in all graphs, regardless of the order and number of steps."""
        space = fx.Graph()
        for spec in self._inputs:
            space.placeholder(spec.name)
        return {n: space.placeholder(step.op.split("::")[-1].split(".")[0]).name for n, step in self._numbered()}

    def _graph(
        self,
        rank: int,
        order: Sequence[int],
        instead: Mapping[tuple[int, int], int],
        result: Any,
        names: Mapping[int, str],
    ) -> fx.Graph:
        builder = GraphBuilder(self.mesh, {spec.name: spec for spec in self._inputs}, rank)
        nodes = self._write(builder, order, instead)
        returned = map_aggregate(result, lambda arg: nodes[arg.number] if isinstance(arg, DraftValue) else arg)
        graph = builder.finish(returned, {nodes[number] for number in self.dead})
        if self.swaps or self.instead or any(step.only is not None for _, step in self._numbered()):
            graph, copies = _renamed(graph, {nodes[n]: names[n] for n in order if n in names})
            nodes = {n: copies[node] for n, node in nodes.items() if node in copies}
        kept = {node.name for node in graph.nodes}
        for later, earlier in self.after:
            if later in nodes and earlier in nodes and {nodes[later].name, nodes[earlier].name} <= kept:
                nodes[later].meta.setdefault("after", []).append(nodes[earlier].name)
        return graph


def _layouts_by_rank(specs: tuple[Any, ...]) -> list[Any]:
    first = _layouts(specs[0])
    return [first if one is specs[0] else _layouts(one) for one in specs]


def _layouts(specs: Any) -> Any:
    if isinstance(specs, (tuple, list)):
        return tuple(_layouts(one) for one in specs)
    return specs.layout if isinstance(specs, TensorSpec) else specs


def _renamed(graph: fx.Graph, names: Mapping[fx.Node, str]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """The graph with other names of steps, and its nodes by those they are copies of."""
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:

        def copied(arg: Any) -> Any:
            return copies[arg] if isinstance(arg, fx.Node) else arg

        args, kwargs = map_aggregate(node.args, copied), dict(map_aggregate(node.kwargs, copied))
        copies[node] = add_node(new, node.op, node.target, args, kwargs, names.get(node, node.name))
        copies[node].meta.update(node.meta)
    return new, copies


__all__ = ["AsyncDraft", "Flight"]
