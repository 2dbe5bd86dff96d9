"""Loads the program that the user names: program files, exported programs, functions that give graphs."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tcverify.capturing.assemble import RankRule, for_all_ranks, program_of
from tcverify.capturing.compile_artifacts import ArtifactText, place_of, texts_in
from tcverify.capturing.groups import (
    group_names_in,
    groups_from_sizes,
    mesh_of_sizes,
    mesh_text,
    rank_at,
    unknown_group,
)
from tcverify.capturing.processes import DEFAULT_TIMEOUT, CaptureSource, capture_all
from tcverify.capturing.record import Captured, GroupFacts
from tcverify.errors import ProgramError, UsageError
from tcverify.program import Mesh, Placement, Program
from tcverify.program.codec import decode, load_json

#: Most bytes of a program file.
MAX_FILE = 64 << 20


@dataclass(frozen=True)
class UserFacts:
    """What the user declares about graphs.

    Attributes:
        mesh: the mesh dims.
        world_size: the number of ranks, if no mesh is given.
        groups: by name: a mesh dim, or its ranks on the ranks that are in it.
        placements: of inputs, by name and mesh dim.
        rules: which integers depend on the rank, if one graph is used for all.
        rank: the rank of a single graph.
        spmd: whether one graph is used for all ranks, so that a function is called only once.
        seed: of the drawn values.
    """

    mesh: Mesh | None = None
    world_size: int | None = None
    groups: Mapping[str, str | Sequence[tuple[int, ...]]] = field(default_factory=dict)
    placements: Mapping[str, Mapping[str, Placement]] = field(default_factory=dict)
    rules: Sequence[RankRule] = ()
    rank: int = 0
    spmd: bool = False
    seed: int = 0
    timeout: float = DEFAULT_TIMEOUT


@dataclass(frozen=True)
class LoadedProgram:
    """A program, and what its user may want to know of how it came about."""

    program: Program
    notes: tuple[str, ...] = ()


def load(sources: Sequence[str], told: UserFacts) -> LoadedProgram:
    """Load one program: from one source, or from the graphs of all ranks in their order.

    A source is a tcverify program or counterexample (`.json`), an exported program (`.pt2`), or "module:function", which is
    called for every rank in a separate process.

    Raises:
        UsageError: a source is of no known kind, or options exclude each other.
        ProgramError: it is not a valid program; the message says what is wrong, and on which rank.
    """
    artifacts = _artifacts(sources)
    for text in sources if artifacts is None else ():
        _require_kind(text)
    if sources[0].endswith(".json"):
        if len(sources) > 1:
            raise UsageError("a program file holds the graphs of all ranks", "give one")
        return LoadedProgram(replace(_from_file(Path(sources[0])), seed=told.seed))
    size = told.mesh.world_size if told.mesh is not None else told.world_size
    sources = sources if artifacts is None else artifacts
    if len(sources) > 1:
        if size not in (None, len(sources)):
            raise UsageError(f"{len(sources)} graphs are given for {size} ranks", "give one graph, or one per rank")
        size = len(sources)
        wanted = [CaptureSource(text, rank, _group_size(text, size)) for rank, text in enumerate(sources)]
    elif told.spmd or told.rules or sources[0].endswith(".pt2") or artifacts is not None or size is None:
        wanted = [CaptureSource(sources[0], told.rank, _group_size(sources[0], size))]
    else:
        wanted = [CaptureSource(sources[0], rank, size) for rank in range(size)]
    found = capture_all(wanted, told.timeout)
    first = found[0]
    if isinstance(first, Program):
        return LoadedProgram(replace(first, seed=told.seed))
    captures = [captured for one in found if not isinstance(one, Program) for captured in one]
    if len(found) > 1 and len(captures) != len(found):
        raise ProgramError(
            f"{sources[0]} returns several graphs, but one rank asked for its own", "return one graph, of that rank"
        )
    return _of_captures(captures, told, size)


def _of_captures(captures: list[Captured], told: UserFacts, size: int | None) -> LoadedProgram:
    mesh = told.mesh
    said = []
    if mesh is None and any(one.sizes for one in captures):
        mesh = mesh_of_sizes(captures[0].sizes, size)
        said = [f"the file contains only the sizes of its process groups; assuming the mesh {mesh_text(mesh)}"]
    if len(captures) == 1:
        if mesh is None and size is not None:
            mesh = Mesh.grid({"world": size})
        if mesh is None:
            raise UsageError(
                "one graph is given, but no number of ranks",
                "give --mesh (tp=2) or --world-size; or the graph of every rank",
            )
        found = captures[0].rank if captures[0].rank is not None else rank_at(captures[0].sizes, mesh)
        rank = found if found is not None else told.rank
        captured = _grouped(captures[0], told, mesh, rank)
        captures = for_all_ranks(captured, mesh, rank, told.rules)
    else:
        captures = [_grouped(captured, told, mesh, rank) for rank, captured in enumerate(captures)]
    program = program_of(captures, mesh, told.placements, seed=told.seed, unknown=True)
    notes = dict.fromkeys(note for captured in captures for note in captured.notes)
    return LoadedProgram(program, (*notes, *said, *_assumed(program, captures, told)))


def _grouped(captured: Captured, told: UserFacts, mesh: Mesh | None, rank: int) -> Captured:
    """Add the user's declarations of groups."""
    groups = dict(captured.groups)
    used = group_names_in(captured.graph)
    for name, said in told.groups.items():
        if isinstance(said, str):
            if mesh is None:
                raise UsageError(f"--group {name}={said} names a mesh dim, but no mesh is given", "give --mesh as well")
            groups[name] = GroupFacts(said, mesh.dim(said).group(rank))
            continue
        own = [ranks for ranks in said if rank in ranks]
        if own:
            groups[name] = GroupFacts(None, own[0])
        elif name in used:
            raise ProgramError(f"rank {rank} uses group '{name}', but is in none of {[list(r) for r in said]}")
    if mesh is not None:
        groups = {
            **groups_from_sizes({n: captured.sizes[n] for n in used if n in captured.sizes}, mesh, rank),
            **groups,
        }
    missing = [name for name in used if name not in groups]
    if missing and mesh is None:
        raise unknown_group(missing[0], rank)
    for name in missing:
        if mesh is not None and name not in {dim.name for dim in mesh.dims} and len(mesh.dims) > 1:
            raise unknown_group(name, rank)
        dim = next((d for d in mesh.dims if d.name == name), mesh.dims[0]) if mesh is not None else None
        if dim is not None:
            groups[name] = GroupFacts(dim.name, dim.group(rank))
    return replace(captured, groups=groups)


def _assumed(program: Program, captures: Sequence[Captured], told: UserFacts) -> list[str]:
    """The message about inputs with undeclared placements."""
    roles = {one.name: one.role for captured in captures for one in captured.inputs}
    known = {one.name for captured in captures for one in captured.inputs if one.placements is not None}
    known |= {name for name in roles if any(fnmatch.fnmatch(name, pattern) for pattern in told.placements)}
    unknown = dict.fromkeys(name for name, _ in program.unknown)
    apart = [s.name for s in program.inputs if s.placements and s.name not in known and s.name not in unknown]
    said = []
    if unknown:
        names = [name for name in unknown if roles.get(name) in ("input", "tangent")]
        parts = [_listed(names)] if names else []
        parts += [f"{len(unknown) - len(names)} of the parameters and constants"] if len(unknown) > len(names) else []
        said.append(f"placement unknown, treated as different on the ranks: {' and '.join(parts)}")
    if apart:
        said.append(f"treated as different on the ranks, according to the values or the graph: {_listed(apart)}")
    return [f"{text} (--placement INPUT=DIM:PLACEMENT)" for text in said]


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")


def _group_size(text: str, size: int | None) -> int | None:
    """Files need no process group."""
    return None if text.endswith(".pt2") else size


def _artifacts(sources: Sequence[str]) -> list[str] | None:
    """Where the graphs of torch.compile stand that the sources name, one for each rank; None where they name others.

    Raises:
        UsageError: they name graphs of both kinds, or several of one rank.
    """
    places = [None if text.endswith((".json", ".pt2")) else place_of(text) for text in sources]
    if not any(places):
        return None
    found: list[str] = []
    for text, place in zip(sources, places, strict=True):
        if place is None:
            raise UsageError(f"{text} was not written by torch.compile, unlike the others", "give files of one kind")
        path, number = place
        graphs = texts_in(path)
        by_rank: dict[int | None, list[ArtifactText]] = {}
        for graph in graphs:
            by_rank.setdefault(graph.rank, []).append(graph)
        most = max(map(len, by_rank.values()))
        if most > 1 and number is None:
            own = next(some for some in by_rank.values() if len(some) == most)
            which = ", ".join(f"{text}:{place} is {one.name}" for place, one in enumerate(own[:4]))
            raise UsageError(f"{text} holds {most} graphs of one rank", f"say which: {which}")
        if min(map(len, by_rank.values())) <= (number or 0):
            raise UsageError(f"{text}: there are {min(map(len, by_rank.values()))} graphs of one rank", "count from 0")
        found += [own[number or 0].name for own in by_rank.values()]
    return found


def _require_kind(text: str) -> None:
    if text.endswith((".json", ".pt2")):
        if not Path(text).is_file():
            raise UsageError(f"there is no file {text}", "give the path from the current directory")
    elif ":" not in text:
        hint = f"write {text}:graphs" if text.endswith(".py") else "give a .pt2 or .json file, or module:function"
        raise UsageError(f"'{text}' names no function", hint)


def _from_file(path: Path) -> Program:
    try:
        size = path.stat().st_size
        if size > MAX_FILE:
            raise ProgramError(f"{path} has {size} bytes; at most {MAX_FILE} are read")
        data = load_json(path.read_bytes(), str(path))
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror or error}") from None
    if isinstance(data, dict) and data.get("format") == "tcverify-counterexample":
        return decode(data.get("program"), f"{path}: program")
    return decode(data, str(path))


__all__ = ["LoadedProgram", "UserFacts", "load"]
