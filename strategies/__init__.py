"""Hypothesis strategies that draw programs."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from tcverify.program import Mesh, Program
from tcverify.strategies.choices import WIDTH, decode_choices
from tcverify.strategies.meshes import WORLD_SIZES, all_meshes
from tcverify.strategies.transformer import finish, write


def decode(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a program on `mesh`; `b""` gives the smallest one. Equal arguments give equal programs."""
    return finish(write(mesh, *decode_choices(choices)))


def transformer_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw tensor-parallel transformer programs of 1 to 4 layers.

    Args:
        mesh: what they run on; None draws one.
        world_size: of the drawn mesh (see `all_meshes`); None draws 2, 3 or 4.

    Every drawn program is well-typed: it runs in lockstep on every rank, its metadata is right and its outputs are finite.
    About 5 % are degenerate on purpose.
    """
    if mesh is not None:
        return st.binary(min_size=WIDTH, max_size=WIDTH).map(lambda choices: decode(mesh, choices))
    sizes = WORLD_SIZES if world_size is None else (world_size,)
    listed = [one for size in sizes for one in all_meshes(size)]

    def decode_with_mesh(choices: bytes) -> Program:
        return decode(listed[choices[0] % len(listed)], choices[1:])

    # One draw of bytes, the mesh included. Among integers Hypothesis would mix constants that it finds in source files, and
    # a seed would draw other programs whenever some module changes.
    return st.binary(min_size=WIDTH + 1, max_size=WIDTH + 1).map(decode_with_mesh)


#: Strategies by the name that `--strategy` takes; each is called as `transformer_programs` is.
STRATEGIES: dict[str, Callable[..., st.SearchStrategy[Program]]] = {"structured": transformer_programs}

__all__ = ["STRATEGIES", "WORLD_SIZES", "all_meshes", "decode", "transformer_programs"]
