"""Strategies of users: registered under a name, with validation of what they return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from tcverify.errors import TcverifyError, UsageError
from tcverify.program import Mesh, Program

#: Factory of a strategy: called with `mesh` and `world_size`, of which one is None.
Factory = Callable[..., Any]

_PROTOCOL = "it is called with mesh and world_size, one of them None, and returns a strategy"


def make_strategy(factory: Factory, mesh: Mesh | None, world_size: int | None) -> st.SearchStrategy[Program]:
    """Call the factory of a strategy, and check the number of ranks of its programs.

    Args:
        mesh, world_size: for which programs are to be drawn; one of them is None.

    Raises:
        UsageError: immediately, if it does not return a strategy; when drawing, if a result is not a program of this size.
    """
    name = getattr(factory, "__name__", repr(factory)[:80])
    try:
        made = factory(mesh=mesh, world_size=world_size)
    except TcverifyError:
        raise
    except Exception as error:
        raise UsageError(f"programs={name} cannot be called: {type(error).__name__}: {error}", _PROTOCOL) from error
    if not isinstance(made, st.SearchStrategy):
        raise UsageError(f"programs={name} returned {repr(made)[:80]}, which is not a strategy")
    wanted = mesh.world_size if mesh is not None else world_size

    def require(program: Any) -> Program:
        checked = require_program(program)
        if checked.world_size != wanted:
            raise UsageError(
                f"the strategy drew a program of {checked.world_size} ranks, where one of {wanted} was asked for",
                f"{name} is to heed mesh and world_size",
            )
        return checked

    return made.map(require)


def require_program(drawn: Any) -> Program:
    """Return what a strategy drew. Raises `UsageError` unless it is a program."""
    if not isinstance(drawn, Program):
        raise UsageError(f"the strategy drew a {type(drawn).__name__}", "it is to draw tcverify.Program")
    return drawn


__all__ = ["Factory", "make_strategy", "require_program"]
