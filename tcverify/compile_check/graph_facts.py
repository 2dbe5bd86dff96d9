"""What is known of a graph that a compiler works on: the rank, its groups, and how inputs are placed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.tensor import DTensor

from tcverify.capturing import GroupFacts, InputFacts
from tcverify.capturing.groups import find_known_groups, group_names_in
from tcverify.capturing.model import placements_by_group
from tcverify.capturing.record import InputRole
from tcverify.capturing.symbolic_sizes import concrete_size
from tcverify.errors import TcverifyError
from tcverify.program import Mesh, Placement

#: Placements by name of the input and mesh dim. The name "*" is for every input of which nothing else is known.
Placements = Mapping[str, Mapping[str, Placement]]

EVERY = "*"

LOG = logging.getLogger("tcverify")


@dataclass(frozen=True, slots=True)
class Examples:
    """What the inputs of a graph of TorchDynamo tell, by their numbers.

    Attributes:
        groups: of the meshes that they lie on, by c10d's names.
    """

    inputs: tuple[InputFacts, ...] = ()
    groups: Mapping[str, GroupFacts] = field(default_factory=dict)


#: What is known of the graph that is being compiled, where a backend of ours has told.
_EXAMPLES: ContextVar[Examples] = ContextVar("examples of the graph that is compiled", default=Examples())  # noqa: B039 - frozen


def examples_of(inputs: Sequence[Any]) -> Examples:
    """What example inputs tell: which are parameters, and how DTensors are placed."""
    groups: dict[str, GroupFacts] = {}
    found = []
    for value in inputs:
        role: InputRole = "parameter" if isinstance(value, torch.nn.Parameter) else "input"
        fact = InputFacts(role)
        if isinstance(value, DTensor):
            try:
                fact = InputFacts(
                    role,
                    placements_by_group(value, groups),
                    tuple(int(concrete_size(n, "an input")) for n in value.shape),
                )
            except (TcverifyError, LookupError, RuntimeError) as error:  # its process group may be gone
                LOG.warning("the placement of an input is not known: %s: %s", type(error).__name__, error)
        found.append(fact)
    return Examples(tuple(found), groups)


@contextlib.contextmanager
def publish_examples(examples: Examples) -> Iterator[None]:
    """Passes that are called inside see these examples."""
    token = _EXAMPLES.set(examples)
    try:
        yield
    finally:
        _EXAMPLES.reset(token)


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where this process stands among the ranks of a job.

    Attributes:
        real: whether the other ranks are processes that can be asked; not so where there is no process group, or a fake one.
    """

    rank: int
    world_size: int
    real: bool


@dataclass(frozen=True, slots=True)
class SharedFacts:
    """What the ranks have in common.

    Attributes:
        alike: groups, as the graph names them, whose members run the same graph up to numbers.
        same_numbers: calls in which the numbers are the same, too.
    """

    alike: tuple[str, ...] = ()
    same_numbers: tuple[str, ...] = ()


def find_job_place(mesh: Mesh | None) -> JobPlace:
    """Where this process stands. A mesh says that this rank speaks for all."""
    running = dist.is_available() and dist.is_initialized()
    rank = dist.get_rank() if running else 0
    size = dist.get_world_size() if running else 1
    if mesh is not None:
        return JobPlace(rank if rank < mesh.world_size else 0, mesh.world_size, False)
    return JobPlace(rank, size, running and size > 1 and dist.get_backend() != "fake")


def groups_of(
    graph: fx.Graph, place: JobPlace, mesh: Mesh | None, said: Mapping[str, str | Sequence[int]]
) -> dict[str, GroupFacts]:
    """The groups that a graph names and those that its inputs are placed over, as far as they are known.

    Args:
        said: by name of the group the mesh dim that it is, or its ranks.
    """
    found = {
        **find_known_groups(group_names_in(graph)),
        **_EXAMPLES.get().groups,
    }  # a mesh knows its dims by name, a group may not
    for name in group_names_in(graph):
        dim = said.get(name, name)
        if not isinstance(dim, str):
            found[name] = GroupFacts(None, tuple(dim))
        elif mesh is not None and any(dim == known.name for known in mesh.dims):
            found[name] = GroupFacts(dim, mesh.dim(dim).group(place.rank))
        elif mesh is not None and len(mesh.dims) == 1 and name not in found:
            found[name] = GroupFacts(mesh.dims[0].name, mesh.dims[0].group(place.rank))
    return found


def inputs_of(graph: fx.Graph) -> dict[str, InputFacts]:
    """What is known of the inputs of a graph of AOTAutograd, by name of the placeholder."""
    examples = _EXAMPLES.get().inputs
    found = {}
    for node in graph.nodes:
        if node.op != "placeholder" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        described: Any = node.meta.get("desc")
        inside = hasattr(described, "base")  # a part of a tensor subclass
        while hasattr(described, "base"):
            described = described.base
        kind = type(described).__name__
        if kind == "TangentAOTInput":
            found[node.name] = InputFacts("tangent")
        elif kind == "ParamAOTInput":
            found[node.name] = InputFacts("parameter")
        elif kind == "PlainAOTInput" and described.idx < len(examples):
            known = examples[described.idx]
            found[node.name] = known if inside or known.placements is None else InputFacts(known.role)
    return found


@contextlib.contextmanager
def write_annotations(
    graph: fx.Graph,
    owner: fx.GraphModule | None,
    place: JobPlace,
    groups: Mapping[str, GroupFacts],
    placements: Placements,
    common: SharedFacts,
) -> Iterator[None]:
    """Inside, the graph tells a pass what programs of tcverify tell it; see `annotate`."""
    written = _write(graph, owner, place, groups, placements, common)
    try:
        yield
    finally:
        for meta, key in written:
            meta.pop(key, None)


def annotate(
    gm: fx.GraphModule,
    placements: Placements | None = None,
    *,
    mesh: Mesh | None = None,
    groups: Mapping[str, str | Sequence[int]] | None = None,
) -> None:
    """Write the known facts of a graph to the metadata that passes read, unless they are present; not needed for checked passes.

    `gm.meta["rank"]`; `gm.meta["groups"]`, name of the group in the graph → its ranks in order; `gm.meta["alike"]`, the groups
    whose members run the same graph up to numbers, and `gm.meta["same_numbers"]`, the calls in which the numbers are the same,
    too: all of them, as where one script runs on all ranks and no number depends on the rank; and `meta["placement"]` of
    placeholders, ranks of a group → `Placement`.

    Args:
        placements: of inputs, by name and mesh dim; "*" applies to all inputs with an unknown placement.
        mesh: the mesh dims, where there is no process group to ask.
        groups: by name of a group in the graph, the mesh dim that it is, or its ranks.
    """
    place = find_job_place(mesh)
    facts = groups_of(gm.graph, place, mesh, groups or {})
    calls = tuple(node.name for node in gm.graph.nodes if node.op == "call_function")
    _write(gm.graph, gm, place, facts, placements or {}, SharedFacts(tuple(facts), calls))


def _write(
    graph: fx.Graph,
    owner: fx.GraphModule | None,
    place: JobPlace,
    groups: Mapping[str, GroupFacts],
    placements: Placements,
    common: SharedFacts,
) -> list[tuple[dict[str, Any], str]]:
    """Write what is known where nothing is written yet; returns what has been written, and where."""
    written: list[tuple[dict[str, Any], str]] = []

    def write(meta: dict[str, Any], key: str, value: Any) -> None:
        if key not in meta:
            meta[key] = value
            written.append((meta, key))

    if owner is not None:
        write(owner.meta, "rank", place.rank)
        write(owner.meta, "groups", {name: facts.ranks for name, facts in groups.items()})
        write(owner.meta, "alike", common.alike)
        write(owner.meta, "same_numbers", frozenset(common.same_numbers))
    known = inputs_of(graph)
    for node in graph.nodes:
        if node.op == "placeholder":
            found = _placed(node, known.get(node.name), groups, placements)
            if found:
                write(node.meta, "placement", found)
    return written


def _placed(
    node: fx.Node, known: InputFacts | None, groups: Mapping[str, GroupFacts], placements: Placements
) -> dict[tuple[int, ...], Placement]:
    """How an input is placed, by the ranks of each group."""
    said = placements.get(node.name)
    captured = dict(known.placements) if known is not None and known.placements is not None else None
    if said is None and captured is None:
        said = placements.get(EVERY, {})
    found = {}
    for name, facts in groups.items():
        of_group = (said or {}).get(facts.label or name, (said or {}).get(name))
        placement = of_group if of_group is not None else (captured or {}).get(name)
        if placement is not None and len(facts.ranks) > 1:
            found[facts.ranks] = placement
    return found


__all__ = [
    "Examples",
    "JobPlace",
    "Placements",
    "SharedFacts",
    "annotate",
    "examples_of",
    "find_job_place",
    "groups_of",
    "inputs_of",
    "publish_examples",
    "write_annotations",
]
