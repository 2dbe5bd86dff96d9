"""Makes one program of what was captured on every rank, or on one rank of a program that all ranks run."""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from tcverify.capturing.groups import group_names_in, mesh_of, rank_arguments, rank_lists, rename_groups, unknown_group
from tcverify.capturing.input_placements import find_varying_inputs
from tcverify.capturing.record import Captured, CapturedInput, GroupFacts
from tcverify.errors import ProgramError
from tcverify.program import REPLICATED, UNKNOWN, VARYING, InputSpec, Mesh, MeshDim, Placement, Program, Recipe
from tcverify.program.graph import RankBinding, copy_graph
from tcverify.program.placement import chunk_bounds


def program_of(
    captures: Sequence[Captured],
    mesh: Mesh | None = None,
    placements: Mapping[str, Mapping[str, Placement]] | None = None,
    *,
    seed: int = 0,
    unknown: bool = False,
) -> Program:
    """Build a program from the captured graphs of all ranks, in the order of ranks.

    Args:
        mesh: the mesh dims, if known; missing groups are added (see `groups.mesh_of`).
        placements: of inputs, by name and mesh dim; they override captured ones. A pattern such as "primals_*" applies to the
            inputs with these names whose placement was not captured.
        seed: of the drawn values.
        unknown: whether inputs without a known placement stay unknown, unless the graphs show by gathers or sums that every
            rank has its own values. Otherwise they are treated as equal on all ranks.

    Raises:
        ProgramError: the parts do not fit together.
    """
    for rank, captured in enumerate(captures):
        for name in group_names_in(captured.graph):
            if name not in captured.groups:
                raise unknown_group(name, rank)
    mesh, names = mesh_of(captures, mesh)
    said = _checked_placements(placements or {}, captures, mesh)
    inputs, mesh, renames = _inputs(captures, names, mesh, said, unknown)
    made: dict[Any, int] = {}
    distinct: list[fx.Graph] = []
    bindings = []
    for captured, dims, own in zip(captures, names, renames, strict=True):  # many ranks may run one graph
        key = id(captured.graph), tuple(dims.items()), tuple(own.items())
        if key not in made:
            made[key] = len(distinct)
            distinct.append(_named(captured.graph, dims, own))
        bindings.append(RankBinding(made[key], {}))
    modules = tuple(c.module for c in captures)
    program = Program(mesh, tuple(distinct), tuple(bindings), tuple(inputs), seed, ("captured",))
    return program.with_graphs([distinct[b.graph] for b in bindings], modules if any(modules) else ())


def _named(graph: fx.Graph, dims: Mapping[str, str], names: Mapping[str, str]) -> fx.Graph:
    """A copy of a graph with other names of groups and placeholders."""
    copy = copy_graph(graph, names=names)
    rename_groups(copy, dims)
    for node in copy.nodes:
        if node.op == "placeholder":
            node.target = node.name
    return copy


# ----------------------------------------------------------------------------------------------------------------- inputs


def _checked_placements(
    placements: Mapping[str, Mapping[str, Placement]], captures: Sequence[Captured], mesh: Mesh
) -> Mapping[str, Mapping[str, Placement]]:
    known = {i.name for captured in captures for i in captured.inputs}
    told = {i.name for captured in captures for i in captured.inputs if i.placements is not None}
    found: dict[str, Mapping[str, Placement]] = {}
    for pattern, by_dim in placements.items():
        names = fnmatch.filter(sorted(known), pattern)
        if not names:
            raise ProgramError(f"there is no input '{pattern}' to place", f"the inputs are {', '.join(sorted(known))}")
        for dim in by_dim:
            mesh.dim(dim)
        found.update({name: by_dim for name in names if name == pattern or not (name in placements or name in told)})
    return found


def _inputs(
    captures: Sequence[Captured],
    names: Sequence[Mapping[str, str]],
    mesh: Mesh,
    said: Mapping[str, Mapping[str, Placement]],
    unknown: bool,
) -> tuple[list[InputSpec], Mesh, list[dict[str, str]]]:
    """The inputs of the program; the mesh, with a dim of all ranks where values need one; new names of placeholders, by rank."""
    by_name: dict[str, dict[int, CapturedInput]] = {}
    for rank, captured in enumerate(captures):
        for one in captured.inputs:
            by_name.setdefault(one.name, {})[rank] = one
    specs: list[InputSpec] = []
    renames: list[dict[str, str]] = [{} for _ in captures]
    taken = set(by_name)
    told = find_varying_inputs(captures[0].graph) if unknown else {}
    for name, held in by_name.items():
        gathered = {names[0][group] for group in told.get(name, ())}
        placed = _placements(name, held, names, mesh, said.get(name))
        if name in said:
            placed += tuple((dim, VARYING) for dim in gathered if dim not in said[name])
        alike = _fitting(name, held, mesh, placed)
        for number, ranks in enumerate(alike):
            own = name
            if number:
                own = next(f"{name}_{i}" for i in itertools.count(number) if f"{name}_{i}" not in taken)
                taken.add(own)
                for rank in ranks:
                    renames[rank][name] = own
            part, own_placed = {rank: held[rank] for rank in ranks}, placed if not number else ()
            if not own_placed and name not in said:
                own_placed, mesh = _varying_placement(part, mesh)
                if unknown and not own_placed and len(alike) == 1 and all(map(_is_unknown, part.values())):
                    own_placed = _unknown(mesh, gathered)
            spec, mesh = _spec(own, part, mesh, own_placed)
            specs.append(spec)
    return specs, mesh, renames


Placed = tuple[tuple[str, Placement], ...]


def _placements(
    name: str,
    held: Mapping[int, CapturedInput],
    names: Sequence[Mapping[str, str]],
    mesh: Mesh,
    said: Mapping[str, Placement] | None,
) -> Placed:
    """How an input is placed, by mesh dim: as the user says, else as was captured on all ranks that have it."""
    if said is not None:
        return tuple((dim, p) for dim, p in said.items() if p != REPLICATED)
    found: dict[Placed, None] = {}
    for rank, one in held.items():
        dims = names[rank]
        own = []
        for label, placement in one.placements or ():
            dim = dims.get(label, label)
            mesh.dim(dim)  # raises, and names those that there are
            if placement != REPLICATED:
                own.append((dim, placement))
        found[tuple(own)] = None
    if len(found) > 1:
        raise ProgramError(f"input '{name}' is placed differently on different ranks: {' and '.join(map(str, found))}")
    return next(iter(found))


def _fitting(name: str, held: Mapping[int, CapturedInput], mesh: Mesh, placed: Placed) -> list[list[int]]:
    """The ranks that hold a part of one global tensor; ranks whose shapes do not fit have separate inputs."""
    if len({one.spec.dtype for one in held.values()}) > 1 or len({len(one.spec.shape) for one in held.values()}) > 1:
        return _by_shape(held)
    try:
        shape = _global_shape(held, mesh, placed)
    except ProgramError:
        if not placed:
            return _by_shape(held)
        raise ProgramError(
            f"input '{name}' has the shapes {sorted({one.spec.shape for one in held.values()})} on the ranks, which are not "
            f"parts of one tensor placed {', '.join(f'{p} over {d}' for d, p in placed)}",
            f"give its placement: --placement {name}=DIM:PLACEMENT",
        ) from None
    probe = InputSpec(name, shape, next(iter(held.values())).spec.dtype, placed)
    fitting = all(probe.local_shape(mesh, rank) == one.spec.shape for rank, one in held.items())
    return [list(held)] if fitting else _by_shape(held)


def _by_shape(held: Mapping[int, CapturedInput]) -> list[list[int]]:
    classes: dict[Any, list[int]] = {}
    for rank, one in held.items():
        classes.setdefault((one.spec.shape, one.spec.dtype), []).append(rank)
    return list(classes.values())


def _global_shape(held: Mapping[int, CapturedInput], mesh: Mesh, placed: Placed) -> tuple[int, ...]:
    """The shape of the whole of which the ranks hold parts.

    Raises:
        ProgramError: there is none.
    """
    first = next(iter(held))
    said = held[first].shape
    shape = list(held[first].spec.shape)
    if said is not None and len(said) == len(shape):
        return said
    for dim_name, placement in reversed(placed):
        if placement.kind != "shard" or placement.dim is None or placement.dim >= len(shape):
            continue
        group = mesh.dim(dim_name).group(first)
        sizes = [held[r].spec.shape[placement.dim] if r in held else None for r in group]
        if None in sizes:
            raise ProgramError("a rank of the group lacks the input")
        total = sum(size for size in sizes if size is not None)
        expected = [high - low for low, high in (chunk_bounds(total, len(group), i) for i in range(len(group)))]
        alone = sum(p.kind == "shard" for _, p in placed) == 1
        if alone and expected != sizes:
            raise ProgramError("the sizes are not those of chunks")
        shape[placement.dim] = total if alone else shape[placement.dim] * len(group)
    return tuple(shape)


def _spec(name: str, held: Mapping[int, CapturedInput], mesh: Mesh, placed: Placed) -> tuple[InputSpec, Mesh]:
    one = next(iter(held.values()))
    recipes = {rank: each.recipe for rank, each in held.items()}
    given = [r for r in recipes.values() if r.kind == "given"]
    if given and len(given) == len(recipes):
        return _make_given_input(name, held, mesh)
    recipe = next((r for r in recipes.values() if r.kind != "given"), one.recipe)
    if recipe.kind == "integers":
        recipe = Recipe("integers", min(r.scale for r in recipes.values() if r.kind == "integers"))
    return InputSpec(name, _global_shape(held, mesh, placed), one.spec.dtype, placed, recipe), mesh


def _make_given_input(name: str, held: Mapping[int, CapturedInput], mesh: Mesh) -> tuple[InputSpec, Mesh]:
    """An input that is given its values; where ranks differ, they are told by the mesh dims over which they do."""
    one = next(iter(held.values()))
    values = {rank: each.recipe.values for rank, each in held.items()}
    if len(set(values.values())) == 1:
        return InputSpec(name, one.spec.shape, one.spec.dtype, (), one.recipe), mesh
    dims = [dim for dim in mesh.dims if _differs(values, dim)]
    lengths = [len(dim.groups[0]) for dim in dims]
    table: dict[tuple[int, ...], tuple[float, ...]] = {}
    even = all(len(group) == length for dim, length in zip(dims, lengths, strict=True) for group in dim.groups)
    for rank, own in values.items():
        place = tuple(dim.position(rank) for dim in dims)
        even = even and table.setdefault(place, own) == own
    everywhere = itertools.product(*map(range, lengths))
    if not even or any(place not in table for place in everywhere):
        mesh, dim = _everybody(mesh)
        dims, lengths = [dim], [mesh.world_size]
        table = {(rank,): values.get(rank, one.recipe.values) for rank in range(mesh.world_size)}
    flat = tuple(v for place in itertools.product(*map(range, lengths)) for v in table[place])
    placed = tuple((dim.name, VARYING) for dim in dims)
    return InputSpec(name, one.spec.shape, one.spec.dtype, placed, Recipe("given", values=flat)), mesh


def _varying_placement(held: Mapping[int, CapturedInput], mesh: Mesh) -> tuple[Placed, Mesh]:
    """How an input is placed of which nothing is said: where ranks hold other values of it, as in parameters that a model has
    divided by itself, they are drawn apart, so that nobody takes one for the other."""
    digests = {rank: one.digest for rank, one in held.items() if one.placements is None}
    if len(digests) < len(held) or None in digests.values() or len(set(digests.values())) == 1:
        return (), mesh
    dims = [dim for dim in mesh.dims if _differs(digests, dim)]
    known: dict[tuple[int, ...], str | None] = {}
    explained = all(
        known.setdefault(tuple(dim.position(rank) for dim in dims), digest) == digest
        for rank, digest in digests.items()
    )
    if not explained:
        mesh, everybody = _everybody(mesh)
        dims = [everybody]
    return tuple((dim.name, VARYING) for dim in dims), mesh


def _is_unknown(one: CapturedInput) -> bool:
    return one.placements is None and one.digest is None and one.recipe.kind != "given"


def _unknown(mesh: Mesh, own: Collection[str]) -> Placed:
    """The placement of an input of which only the dims are known over which every rank has its own values."""
    dims = [dim.name for dim in mesh.dims if any(len(group) > 1 for group in dim.groups)]
    return tuple((name, VARYING if name in own else UNKNOWN) for name in dims)


def _differs(values: Mapping[int, object], dim: MeshDim) -> bool:
    return any(len({values[rank] for rank in group if rank in values}) > 1 for group in dim.groups)


def _everybody(mesh: Mesh) -> tuple[Mesh, MeshDim]:
    """The mesh with a dim whose one group is all ranks, in order."""
    ranks = tuple(range(mesh.world_size))
    for dim in mesh.dims:
        if dim.groups == (ranks,):
            return mesh, dim
    names = {dim.name for dim in mesh.dims}
    dim = MeshDim(
        next(n for n in itertools.chain(["world"], map("world_{}".format, itertools.count())) if n not in names),
        (ranks,),
    )
    return Mesh(mesh.world_size, (*mesh.dims, dim)), dim


# ------------------------------------------------------------------------------------------------- one graph for all ranks


@dataclass(frozen=True, slots=True)
class RankRule:
    """An integer of a captured graph that depends on the rank: `factor` times its number, or position in a group, plus `offset`.

    Attributes:
        node: name of the node.
        argument: position of the argument; of a list, (argument, item).
        dim: the mesh dim whose position counts, or None for the rank's number.
    """

    node: str
    argument: tuple[int, ...]
    factor: int = 1
    dim: str | None = None
    offset: int = 0

    def value(self, mesh: Mesh, rank: int) -> int:
        place = rank if self.dim is None else mesh.dim(self.dim).position(rank)
        return self.factor * place + self.offset

    @classmethod
    def parse(cls, text: str) -> RankRule:
        """Read `NODE.ARGUMENT=FACTOR*rank+OFFSET`, e.g. "slice_1.2=4*tp" or "narrow.1.0=rank+1".

        Raises:
            ProgramError: it is not of this form.
        """
        match = re.fullmatch(r"(\w+)((?:\.\d+)+)=(?:(-?\d+)\*)?([A-Za-z_]\w*)([+-]\d+)?", text.replace(" ", ""))
        if match is None:
            raise ProgramError(
                f"'{text}' is not a rule for a rank constant",
                "write NODE.ARGUMENT=FACTOR*DIM+OFFSET, where DIM is rank or a mesh dim, e.g. slice_1.2=4*tp",
            )
        node, path, factor, dim, offset = match.groups()
        places = tuple(int(part) for part in path.strip(".").split("."))
        return cls(node, places, int(factor or 1), None if dim == "rank" else dim, int(offset or 0))


def for_all_ranks(captured: Captured, mesh: Mesh, rank: int = 0, rules: Sequence[RankRule] = ()) -> list[Captured]:
    """Return what every rank runs, given the graph of one rank of a program that all run up to rank constants.

    Groups become those of the other ranks by the mesh dims; the arguments `rank` and `rank_group` of tensor_cast ops likewise.
    `rules` define other integers that depend on the rank.

    Args:
        rank: whose graph it is.

    Raises:
        ProgramError: a group is of no mesh dim, or a rule names what the graph does not have.
    """
    placing = {label for one in captured.inputs for label, _ in one.placements or () if label in captured.groups}
    named = dict.fromkeys((*group_names_in(captured.graph), *sorted(placing)))
    dims = {name: _dim_of(mesh, rank, name, captured.groups.get(name)) for name in named}
    lists = {
        ranks: _dim_of(mesh, rank, str(list(ranks)), GroupFacts(None, ranks)) for ranks in rank_lists(captured.graph)
    }
    _check_rules(captured, mesh, rank, rules)
    found = []
    same = not rules and not any(map(rank_arguments, captured.graph.nodes))
    for other in range(mesh.world_size):
        graph = captured.graph if same else copy_graph(captured.graph)
        for node in graph.nodes if not same else ():
            _bind_ranks(node, other, lists)
        for rule in rules:
            node = next(n for n in graph.nodes if n.name == rule.node)
            node.args = _with(node.args, rule.argument, rule.value(mesh, other))
        groups = {name: GroupFacts(dim.name, dim.group(other)) for name, dim in dims.items()}
        found.append(replace(captured, graph=graph, groups=groups))
    return found


def _dim_of(mesh: Mesh, rank: int, name: str, facts: GroupFacts | None) -> MeshDim:
    """The mesh dim to which a group of `rank` belongs."""
    if facts is not None:
        for dim in mesh.dims:
            if dim.name == facts.label and dim.group(rank) == facts.ranks:
                return dim
        for dim in mesh.dims:
            if dim.group(rank) == facts.ranks:
                return dim
        raise ProgramError(
            f"group '{name}' of rank {rank} is {list(facts.ranks)}, which matches no mesh dim ({mesh})",
            "give the mesh with --mesh, or the graph of every rank",
        )
    for dim in mesh.dims:
        if dim.name == name:
            return dim
    if len(mesh.dims) == 1:
        return mesh.dims[0]
    raise unknown_group(name, rank)


def _bind_ranks(node: fx.Node, rank: int, lists: Mapping[tuple[int, ...], MeshDim]) -> None:
    given = rank_arguments(node)
    if not given:
        return
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    values: dict[str, Any] = {}
    if type(given.get("rank")) is int:
        values["rank"] = rank
    group = given.get("rank_group")
    if isinstance(group, (list, tuple)):
        values["rank_group"] = list(lists[tuple(group)].group(rank))
    for name, value in values.items():
        if name in node.kwargs:
            node.update_kwarg(name, value)
        else:
            node.update_arg(names.index(name), value)


def _check_rules(captured: Captured, mesh: Mesh, rank: int, rules: Sequence[RankRule]) -> None:
    nodes = {node.name: node for node in captured.graph.nodes}
    for rule in rules:
        if rule.dim is not None:
            mesh.dim(rule.dim)
        value: Any = nodes[rule.node].args if rule.node in nodes else None
        for place in rule.argument:
            value = value[place] if isinstance(value, (list, tuple)) and place < len(value) else None
        path = ".".join(map(str, rule.argument))
        if type(value) is not int:
            raise ProgramError(f"argument {path} of node '{rule.node}' is not an integer: {value!r}")
        if value != rule.value(mesh, rank):
            raise ProgramError(
                f"argument {path} of node '{rule.node}' is {value} on rank {rank}, but its rule gives {rule.value(mesh, rank)}"
            )


def _with(args: Any, path: tuple[int, ...], value: int) -> Any:
    changed = list(args)
    changed[path[0]] = value if len(path) == 1 else _with(changed[path[0]], path[1:], value)
    return tuple(changed) if isinstance(args, tuple) else changed


__all__ = ["RankRule", "for_all_ranks", "program_of"]
