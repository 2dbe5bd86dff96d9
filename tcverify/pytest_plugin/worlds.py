"""The worlds that `verifies` asks for, and the strategies that draw their programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis.strategies import SearchStrategy

from tcverify.errors import ProgramError, UsageError
from tcverify.execution import MAX_RANKS
from tcverify.program import Mesh, Program
from tcverify.pytest_plugin.decorator import Verification
from tcverify.registry.choices import Word, is_one_of
from tcverify.registry.strategies import is_searchable
from tcverify.strategies import DEFAULT_STRATEGY, STRATEGIES, WORLD_SIZES, join_strategy_names, programs_of
from tcverify.strategies.registered import make_strategy, require_program
from tcverify.system.configuration import suggest

#: Programs of other sizes that a strategy may draw before one of the size that is asked for.
MAX_THROWN_AWAY = 500


@dataclass(frozen=True, slots=True)
class World:
    """What programs run on.

    Attributes:
        label: what ids of items call it; empty for the strategy's own worlds.
        name: what people call it.
        size: number of ranks; None for the strategy's own.
        programs: draws the programs.
        mesh: the one of all programs; None where they have several.
        suited: whether other programs take their place, if some suit the pass better: none are asked for.
        thrown_away: whether programs of other sizes are drawn and thrown away.
        searched: whether programs may be made of those that are drawn.
    """

    label: str
    name: str
    size: int | None
    programs: SearchStrategy[Program]
    mesh: Mesh | None = None
    suited: bool = False
    thrown_away: bool = False
    searched: bool = False


def make_worlds(asked: Verification) -> list[World]:
    """Return the worlds. Raises UsageError for what does not exist or cannot work."""
    programs = asked.programs
    if asked.meshes is not None and asked.world_sizes is not None:
        raise UsageError("meshes and world_sizes exclude each other", "a mesh defines the number of ranks")
    if isinstance(programs, SearchStrategy):
        return _worlds_of_strategy(programs, asked)
    unasked, searched = programs is None, False
    if programs is None:
        programs = DEFAULT_STRATEGY
    if isinstance(programs, str):
        names = [known_value(name.strip(), tuple(STRATEGIES), "programs") for name in programs.split(",")]
        factory: Callable[..., Any] = partial(programs_of, join_strategy_names(names))
        searched = is_searchable(join_strategy_names(names))
    elif callable(programs):
        factory = programs
    else:
        raise UsageError(
            f"programs={repr(programs)[:80]} is not a strategy",
            "give a strategy of programs, a function that returns one, or the name of one",
        )
    if asked.meshes is not None:
        meshes = [_mesh(mesh) for mesh in require_list(asked.meshes, "meshes", '[{"tp": 2}]')]
        return [
            World(
                _mesh_label(mesh),
                _mesh_name(mesh),
                mesh.world_size,
                make_strategy(factory, mesh, None),
                mesh,
                unasked,
                searched=searched,
            )
            for mesh in meshes
        ]
    return [
        World(
            f"{size}ranks", f"{size} ranks", size, make_strategy(factory, None, size), suited=unasked, searched=searched
        )
        for size in _sizes(asked)
    ]


def _worlds_of_strategy(programs: SearchStrategy[Program], asked: Verification) -> list[World]:
    if asked.meshes is not None:
        raise UsageError(
            "meshes cannot be combined with a strategy, which draws its own meshes",
            "give the function that makes the strategy, e.g. programs=transformer_programs without parentheses",
        )
    checked = programs.map(require_program)
    if asked.world_sizes is None:
        return [World("", "the strategy's meshes", None, checked)]

    return [
        World(f"{size}ranks", f"{size} ranks", size, checked.filter(_OfSize(size)), thrown_away=True)
        for size in _sizes(asked)
    ]


class _OfSize:
    """Lets programs of one size through. A strategy from elsewhere draws what it draws; ours are made for the size instead.

    Raises:
        UsageError: so many programs in a row were of another size that the strategy seems to draw none of this one.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.thrown_away = 0

    def __call__(self, program: Program) -> bool:
        if program.world_size == self.size:
            self.thrown_away = 0
            return True
        self.thrown_away += 1
        if self.thrown_away > MAX_THROWN_AWAY:
            raise UsageError(
                f"the strategy drew no program of {self.size} ranks among {MAX_THROWN_AWAY}",
                "remove this size from world_sizes, or pass the function that creates the strategy",
            )
        return False


def _sizes(asked: Verification) -> list[int]:
    given = WORLD_SIZES if asked.world_sizes is None else require_list(asked.world_sizes, "world_sizes", "(2, 4)")
    for size in given:
        if type(size) is not int or size < 1:
            raise UsageError(f"{repr(size)[:80]} in world_sizes is not a number of ranks", "write world_sizes=(2, 4)")
        _require_ranks(size)
    return list(dict.fromkeys(given))


def _mesh(given: Any) -> Mesh:
    if isinstance(given, Mapping) and all(isinstance(n, str) and type(s) is int for n, s in given.items()):
        try:
            given = Mesh.grid(given)
        except ProgramError as error:
            raise UsageError(error.message, error.hint) from None
    if not isinstance(given, Mesh):
        raise UsageError(
            f"{repr(given)[:80]} in meshes is not a mesh", 'give a Mesh, or sizes by name: {"dp": 2, "tp": 2}'
        )
    _require_ranks(given.world_size)
    return given


def _require_ranks(size: int) -> None:
    if size < 2:
        raise UsageError("a program needs at least 2 ranks, not 1", "with fewer there are no collectives to verify")
    if size > MAX_RANKS:
        raise UsageError(f"{size} ranks are more than a campaign draws programs for", f"use at most {MAX_RANKS} ranks")


def _is_grid(mesh: Mesh) -> bool:
    return bool(mesh.dims) and mesh == Mesh.grid({dim.name: len(dim.groups[0]) for dim in mesh.dims})


def _mesh_label(mesh: Mesh) -> str:
    """ "dp2tp2"; for meshes that are no row-major grid the groups: "tp1.0_2.3"."""
    if _is_grid(mesh):
        return "".join(f"{dim.name}{len(dim.groups[0])}" for dim in mesh.dims)
    return "-".join(
        dim.name + "_".join(".".join(str(rank) for rank in group) for group in dim.groups) for dim in mesh.dims
    )


def _mesh_name(mesh: Mesh) -> str:
    return ",".join(f"{dim.name}={len(dim.groups[0])}" for dim in mesh.dims) if _is_grid(mesh) else str(mesh)


def require_list(given: Any, name: str, example: str) -> Sequence[Any]:
    """Return a list that is one and is not empty, or raise UsageError."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence):
        raise UsageError(f"{name}={repr(given)[:80]} is not a list", f"write {name}={example}")
    if not given:
        raise UsageError(f"{name} is empty", f"write {name}={example}, or leave it out")
    return given


def known_value(given: Any, known: Sequence[Word], name: str) -> Word:
    """Return a name that is among the known ones, or raise UsageError."""
    if not is_one_of(given, known):
        raise UsageError(f"there is no {name}={repr(given)[:80]}", suggest(str(given), known, f"values of {name}"))
    return given
