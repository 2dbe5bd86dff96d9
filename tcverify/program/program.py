"""Program: what every rank runs, and on which inputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.errors import ProgramError
from tcverify.ops import TensorSpec, lookup
from tcverify.program.graph import (
    RankBinding,
    bind,
    calls_without_rank_constants,
    compute_nodes,
    describe,
    fake_values,
    lazy_module,
    with_metadata,
)
from tcverify.program.inputs import InputSpec, Sources
from tcverify.program.mesh import Mesh, MeshDim
from tcverify.program.pass_options import Options, check_options
from tcverify.program.placement import REPLICATED, UNKNOWN, VARYING, Placement
from tcverify.program.sharing import group_alike, share
from tcverify.program.stream_options import StreamSettings
from tcverify.registry.choices import SizesName

#: Up to this many elements in the inputs of all ranks, a program is small, whatever it computes.
FEW_ELEMENTS = 1 << 20

#: Largest number of simultaneous elements on all ranks for a program that runs at its own sizes: 256 MiB in float64.
LARGE = 1 << 25


@dataclass(frozen=True, eq=False)
class Program:
    """A distributed program: a mesh, the distinct graphs, what each rank runs, and the inputs.

    Attributes:
        graphs: the distinct FX graphs, shared by ranks; `RankConstant`s replace values that differ. Treat them as frozen.
        ranks: per rank, its graph and constants.
        inputs: specs of the inputs; a placeholder reads the input of its name.
        seed: of the input values.
        labels: features that it was drawn with ("tp", "fused-residual", …); without meaning.
        modules: per graph, the module that owns its attributes and submodules, for graphs that files cannot hold.
        streams: stream settings for the compiler, if any.
        options: options of the pass for this program, by name, in `gm.meta["options"]`; all others keep the pass's defaults.
        sizes: at which it runs; stored in files if a large program runs at its own sizes.

    Raises:
        ProgramError: the parts do not fit together.
    """

    mesh: Mesh
    graphs: tuple[fx.Graph, ...]
    ranks: tuple[RankBinding, ...]
    inputs: tuple[InputSpec, ...]
    seed: int = 0
    labels: tuple[str, ...] = ()
    modules: tuple[torch.nn.Module | None, ...] = field(default=())
    streams: StreamSettings | None = None
    options: Options = field(default_factory=dict)
    sizes: SizesName = "auto"

    def __post_init__(self) -> None:
        if len(self.ranks) != self.mesh.world_size:
            raise ProgramError(f"the mesh has {self.mesh.world_size} ranks, but {len(self.ranks)} are described")
        check_options(self.options)
        by_name = self._inputs_by_name
        if len(by_name) != len(self.inputs):
            raise ProgramError("two inputs share a name")
        for spec in self.inputs:
            spec.check_given()
        for rank, binding in enumerate(self.ranks):
            if not 0 <= binding.graph < len(self.graphs):
                raise ProgramError(f"rank {rank} runs graph {binding.graph}, but there are {len(self.graphs)}")
        for graph in self.graphs:
            for node in graph.nodes:
                if node.op == "placeholder" and node.name not in by_name:
                    raise ProgramError(f"placeholder '{node.name}' has no input of its name")

    @cached_property
    def _inputs_by_name(self) -> dict[str, InputSpec]:
        return {spec.name: spec for spec in self.inputs}

    @property
    def world_size(self) -> int:
        return self.mesh.world_size

    @property
    def size(self) -> int:
        """Compute nodes (no placeholder, getitem, output) on the largest rank."""
        return max(len(compute_nodes(graph)) for graph in self.graphs)

    @cached_property
    def elements(self) -> int:
        """Largest number of simultaneous elements on all ranks, as far as metadata gives the sizes of values; 0 for
        small inputs."""
        if sum(math.prod(spec.shape) for spec in self.inputs) * self.world_size <= FEW_ELEMENTS:
            return 0
        sizes = [_peak(graph) for graph in self.graphs]
        return sum(sizes[binding.graph] for binding in self.ranks)

    @property
    def large(self) -> bool:
        """Whether it runs at small sizes instead of its own."""
        return self.sizes == "small" or (self.sizes == "auto" and self.elements > LARGE)

    @property
    def unknown(self) -> list[tuple[str, str]]:
        """The inputs with an unknown placement, each with a mesh dim for which it is unknown."""
        return [(spec.name, dim) for spec in self.inputs for dim, placement in spec.placements if placement == UNKNOWN]

    def with_equal(self, pairs: Collection[tuple[str, str]]) -> Program:
        """The program with these inputs, which are unknown over these mesh dims, made equal on their ranks."""
        inputs = [
            replace(
                spec, placements=tuple(p for p in spec.placements if p[1] != UNKNOWN or (spec.name, p[0]) not in pairs)
            )
            for spec in self.inputs
        ]
        return replace(self, inputs=tuple(inputs))

    def placements(self, name: str, rank: int) -> dict[tuple[int, ...], Placement]:
        """Return how input `name` is placed, by this rank's group of each mesh dim with more than one member. Unknown placements
        count
        as replicated: a rewrite that relies on this depends on a condition, which verification reports."""
        found: dict[tuple[int, ...], Placement] = {}
        for dim in self.mesh.dims:
            group = dim.group(rank)
            if len(group) > 1 and found.get(group, VARYING) == VARYING:  # two dims may have the same group
                found[group] = self._placement(name, dim, group)
        return found

    def _placement(self, name: str, dim: MeshDim, group: tuple[int, ...]) -> Placement:
        """The placement of input `name` over one group of `dim`: as declared, unless another dim distinguishes its members.

        Dims need not form a grid: ranks of one group may have different positions in another dim's groups.
        """
        cached = self._placement_of.get((name, group, dim.name))
        if cached is not None:
            return cached
        found = REPLICATED
        for other, placement in self._inputs_by_name[name].placements:
            if placement in (REPLICATED, UNKNOWN):
                continue
            if other == dim.name:
                found = placement
                continue
            crossing = self.mesh.dim(other)
            if len({(crossing.position(member), len(crossing.group(member))) for member in group}) > 1:
                found = VARYING
                break
        self._placement_of[name, group, dim.name] = found
        return found

    @cached_property
    def _placement_of(self) -> dict[tuple[str, tuple[int, ...], str], Placement]:
        return {}

    def graph(self, rank: int) -> fx.Graph:
        """Return a new FX graph as `rank` runs it: rank constants filled in, fake tensors in `meta["val"]`, and
        `meta["placement"]` (group → `Placement`) on placeholders."""
        return self._graph(rank, None)

    def _graph(self, rank: int, fakes: Sequence[Any] | None) -> fx.Graph:
        binding = self.ranks[rank]
        graph = bind(self.graphs[binding.graph], binding.constants, fakes)
        for node in graph.nodes:
            if node.op != "placeholder":
                break
            node.meta["placement"] = self.placements(node.name, rank)
        return graph

    def graph_module(self, rank: int) -> fx.GraphModule:
        """Return a new GraphModule of `rank`'s graph: the argument of a pass.

        `meta["streams"]` holds the stream settings, `meta["options"]` the options, `meta["rank"]` the rank, `meta["world_size"]`
        the number of ranks, `meta["groups"]` its groups: mesh dim → ranks in
        group order, and `meta["alike"]` lists those over which all members run the same graph up to numbers (see `_alike`).
        `meta["same_numbers"]` lists the calls in which the numbers, too, are the same on all ranks that run the same graph.
        """
        return self._given(rank, self.graph(rank))

    def graph_modules(self, ranks: Sequence[int] | None = None) -> list[fx.GraphModule]:
        """Return a new GraphModule for every rank. Ranks that run one graph share the fake tensors in its metadata.

        Args:
            ranks: only for these.
        """
        fakes: dict[int, list[Any]] = {}
        made = []
        for rank in range(self.world_size) if ranks is None else ranks:
            number = self.ranks[rank].graph
            if number not in fakes:
                fakes[number] = fake_values(self.graphs[number])
            made.append(self._given(rank, self._graph(rank, fakes[number])))
        return made

    @cached_property
    def copies(self) -> list[list[int]]:
        """The ranks that run the same graph up to rank constants, in groups of the same sizes, class by class."""
        classes: dict[Any, list[int]] = {}
        for rank, binding in enumerate(self.ranks):
            sizes = tuple(len(dim.group(rank)) for dim in self.mesh.dims)
            classes.setdefault((binding.graph, sizes), []).append(rank)
        return list(classes.values())

    def _given(self, rank: int, graph: fx.Graph) -> fx.GraphModule:
        module = lazy_module(self._module(rank) or {}, graph, "Program")
        module.meta["rank"] = rank
        module.meta["world_size"] = self.world_size
        module.meta["groups"] = self.mesh.groups(rank)
        module.meta["alike"] = self._alike[self._kinds[rank]]
        module.meta["same_numbers"] = self._same_numbers[self._kinds[rank]]
        if self.options:
            module.meta["options"] = dict(self.options)
        if self.streams is not None:
            module.meta["streams"] = self.streams
        return module

    @cached_property
    def _kinds(self) -> list[int]:
        """For each rank the first rank that runs the same graph, up to numbers, in groups of the same sizes."""
        example = {binding.graph: rank for rank, binding in reversed([*enumerate(self.ranks)])}
        same = {number: number for number in example}
        if len(example) > 1 and any(map(_is_asynchronous, self.graphs)):  # rarely needed otherwise, and slow
            values = [self.ranks[rank].constants for rank in example.values()]
            same = dict(zip(example, group_alike([self.graphs[number] for number in example], values), strict=True))
        first: dict[Any, int] = {}
        return [
            first.setdefault((same[binding.graph], *(len(dim.group(rank)) for dim in self.mesh.dims)), rank)
            for rank, binding in enumerate(self.ranks)
        ]

    @cached_property
    def _alike(self) -> dict[int, tuple[str, ...]]:
        """For each class of ranks, the mesh dims whose groups contain only ranks of one class, for all ranks of the class.

        So ranks of one group that decide by their graph and this list decide the same.
        """
        mixed: dict[int, set[str]] = {kind: set() for kind in self._kinds}
        for rank, kind in enumerate(self._kinds):
            for dim in self.mesh.dims:
                if any(self._kinds[member] != kind for member in dim.group(rank)):
                    mixed[kind].add(dim.name)
        return {kind: tuple(d.name for d in self.mesh.dims if d.name not in found) for kind, found in mixed.items()}

    @cached_property
    def _same_numbers(self) -> dict[int, frozenset[str]]:
        """For each class of ranks, the names of the calls in which no number differs between ranks of the class.

        If such ranks run graphs that are stored separately, any number may differ.
        """
        ran: dict[int, set[int]] = {}
        for kind, binding in zip(self._kinds, self.ranks, strict=True):
            ran.setdefault(kind, set()).add(binding.graph)
        found: dict[tuple[int, ...], frozenset[str]] = {}
        for numbers in map(tuple, map(sorted, ran.values())):
            if numbers not in found:
                found[numbers] = (
                    calls_without_rank_constants(self.graphs[numbers[0]]) if len(numbers) == 1 else frozenset()
                )
        return {kind: found[tuple(sorted(numbers))] for kind, numbers in ran.items()}

    def _module(self, rank: int) -> torch.nn.Module | None:
        return self.modules[self.ranks[rank].graph] if self.modules else None

    def values(self, rank: int) -> list[torch.Tensor]:
        """Return this rank's input values in the order of its placeholders, each a new tensor.

        Raises:
            ProgramError: the inputs are too large.
        """
        names = [n.name for n in self.graphs[self.ranks[rank].graph].nodes if n.op == "placeholder"]
        return [spec.values(self.mesh, rank, self.seed) for spec in self.sources.chosen(names, rank)]

    @property
    def sources(self) -> Sources:
        """The source of the values of the inputs."""
        return Sources(self.mesh, self.inputs, self.seed)

    def with_graphs(self, graphs: Sequence[fx.Graph], modules: Sequence[torch.nn.Module | None] = ()) -> Program:
        """Return the program in which rank i runs `graphs[i]` (fake tensors or specs in `meta["val"]`), same inputs.

        Graphs that are equal up to rank constants are stored once. Placeholders are identified by their targets: renamed ones get
        the names of their inputs back.
        """
        names = self._names
        if any(modules):
            described = tuple(with_metadata(graph, describe(graph), names[rank]) for rank, graph in enumerate(graphs))
            bindings = tuple(RankBinding(i, {}) for i in range(len(graphs)))
            return replace(self, graphs=described, ranks=bindings, modules=tuple(modules))
        shared, bindings = share(graphs, [r.constants for r in self.ranks], names)
        return replace(self, graphs=shared, ranks=bindings, modules=())

    def shared(self, graphs: Mapping[int, fx.Graph]) -> tuple[tuple[fx.Graph, ...], dict[int, RankBinding]]:
        """The distinct graphs that some ranks run, and what each of these runs; see `with_graphs`. Graphs that also differ in
        storage offsets count as equal: the recorded offsets are those of the first rank."""
        ranks = list(graphs)
        found, bindings = share(
            [graphs[rank] for rank in ranks], [self.ranks[rank].constants for rank in ranks],
            [self._names[rank] for rank in ranks], offsets=False,
        )  # fmt: skip
        return found, dict(zip(ranks, bindings, strict=True))

    @cached_property
    def _names(self) -> list[dict[Any, str]]:
        """The names of placeholders by target, rank by rank."""
        own = [{n.target: n.name for n in graph.nodes if n.op == "placeholder"} for graph in self.graphs]
        return [own[binding.graph] for binding in self.ranks]


def _is_asynchronous(graph: fx.Graph) -> bool:
    return any(node.op == "call_function" and lookup(node.target).phase == "start" for node in graph.nodes)


def _peak(graph: fx.Graph) -> int:
    """Largest number of simultaneous elements, by metadata, if values are freed after their last use."""
    last = {read: node for node in graph.nodes for read in node.all_input_nodes}
    users: dict[Any, int] = {}  # of storages
    ending: dict[fx.Node, list[tuple[Any, int]]] = {}
    now = peak = 0
    for node in graph.nodes:
        for number, leaf in enumerate(pytree.tree_leaves(node.meta.get("val"))):
            if not isinstance(leaf, TensorSpec) or node.op == "output":
                continue
            key = leaf.alias if leaf.alias is not None else (node, number)
            if not users.get(key):
                now += leaf.numel
            users[key] = users.get(key, 0) + 1
            ending.setdefault(last.get(node, node), []).append((key, leaf.numel))
        peak = max(peak, now)
        for key, numel in ending.pop(node, ()):
            users[key] -= 1
            if not users[key]:
                now -= numel
    return peak
