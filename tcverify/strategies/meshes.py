"""Meshes that programs are drawn on: group orders, uneven partitions, one or two groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache

from hypothesis import strategies as st

from tcverify.errors import UsageError
from tcverify.program import Mesh, MeshDim, Program

_Groups = tuple[tuple[int, ...], ...]

#: Per world size, the groups of "tp" and, where there are two dims, of "dp"; the simplest first. Two dims are aligned as in
#: a grid (members of one dp group stand at one position of their tp groups), so that a value placed over one dim can
#: be replicated over the other; or both have all ranks, in two orders, so that few ranks too have two groups of more than one.
_LAYOUTS: dict[int, tuple[tuple[_Groups, _Groups | None], ...]] = {
    2: (
        (((0, 1),), None),
        (((1, 0),), None),
        (((0, 1),), ((0,), (1,))),
        (((1, 0),), ((0,), (1,))),
        (((0,), (1,)), ((1, 0),)),
        (((0, 1),), ((1, 0),)),
        (((1, 0),), ((0, 1),)),
    ),
    3: (
        (((0, 1, 2),), None),
        (((2, 0, 1),), None),
        (((0,), (1, 2)), None),
        (((2, 0), (1,)), None),
        (((1, 2, 0),), ((0,), (1,), (2,))),
        (((0,), (1,), (2,)), ((0, 2, 1),)),
        (((0, 1, 2),), ((2, 0, 1),)),
        (((1, 0, 2),), ((0, 2, 1),)),
        (((2, 0, 1),), ((1, 0, 2),)),
    ),
    4: (
        (((0, 1, 2, 3),), None),
        (((0, 1), (2, 3)), ((0, 2), (1, 3))),
        (((1, 0), (3, 2)), ((2, 0), (3, 1))),
        (((0, 2), (1, 3)), ((0, 1), (2, 3))),
        (((3, 1, 0, 2),), None),
        (((0,), (1, 2, 3)), None),
        (((0, 3), (2, 1)), None),
        (((2, 0, 1), (3,)), None),
        (((0, 1), (2,), (3,)), None),
        (((3, 0), (2, 1)), ((0, 1), (3, 2))),
    ),
}

WORLD_SIZES = tuple(_LAYOUTS)


@cache
def all_meshes(world_size: int) -> tuple[Mesh, ...]:
    """Every mesh that is drawn at this world size, the simplest first: dims "tp" and, on some, "dp".

    Raises:
        UsageError: no meshes are listed for this world size.
    """
    try:
        layouts = _LAYOUTS[world_size]
    except KeyError:
        sizes = ", ".join(map(str, WORLD_SIZES))
        raise UsageError(
            f"no meshes are listed for world size {world_size}", f"use one of {sizes}, or give a mesh"
        ) from None
    return tuple(
        Mesh(world_size, (MeshDim("tp", tp),) if dp is None else (MeshDim("dp", dp), MeshDim("tp", tp)))
        for tp, dp in layouts
    )


def drawn_on(
    meshes: Iterable[Mesh], decode: Callable[[Mesh, bytes], Program], width: int
) -> st.SearchStrategy[Program]:
    """Draw one of these meshes, and bytes that are decoded into a program on it.

    Args:
        width: number of bytes of a program.
    """
    listed = tuple(meshes)

    def decoded(choices: bytes) -> Program:
        return decode(listed[choices[0] % len(listed)], choices[1:])

    return st.binary(min_size=width + 1, max_size=width + 1).map(decoded)
