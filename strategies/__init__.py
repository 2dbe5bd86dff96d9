"""Hypothesis strategies that draw programs."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st

from tcverify.program import Mesh, Program
from tcverify.strategies.choices import WIDTH, decode_choices
from tcverify.strategies.meshes import WORLD_SIZES, all_meshes, meshes
from tcverify.strategies.transformer import write_program


def decode(mesh: Mesh, choices: bytes) -> Program:
    """Decode any bytes into a program on `mesh`; `b""` gives the smallest one. Equal arguments give equal programs."""
    return write_program(mesh, *decode_choices(choices))


def transformer_programs(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """Draw tensor-parallel transformer programs of 1 to 4 layers.

    Args:
        mesh: what they run on; None draws one.
        world_size: of the drawn mesh; None draws 2, 3 or 4.

    Every drawn program is well-typed: it runs in lockstep on every rank, its metadata is right and its outputs are finite.
    About 5 % are degenerate on purpose.
    """
    where = st.just(mesh) if mesh is not None else meshes(world_size)
    return st.builds(decode, where, st.binary(min_size=WIDTH, max_size=WIDTH))


#: Strategies by the name that `--strategy` takes; each is called as `transformer_programs` is.
STRATEGIES: dict[str, Callable[..., st.SearchStrategy[Program]]] = {"structured": transformer_programs}

__all__ = ["STRATEGIES", "WORLD_SIZES", "all_meshes", "decode", "meshes", "transformer_programs"]
