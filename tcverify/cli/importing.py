"""Imports what does the work of a command, which takes seconds: once its arguments are found right, and not for help."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from tcverify.errors import UsageError
from tcverify.system import start_server

#: Commands that apply passes or start ranks, which takes processes.
START_PROCESSES = ("run", "check", "replay")


def begin_server() -> None:
    """Start what processes are forked from, unless it runs: it imports what this process imports, one beside the other."""
    with contextlib.suppress(UsageError):  # the command tells, if it comes to start a process
        start_server()


@contextlib.contextmanager
def importing(*, processes: bool = False) -> Iterator[None]:
    """Stands around the import of what does the work of a command.

    Args:
        processes: whether the command starts some.

    Raises:
        UsageError: torch cannot be imported.
    """
    if processes:
        begin_server()
    try:
        import torch
    except (ImportError, OSError) as error:
        raise UsageError(
            f"torch cannot be imported: {error}", "run `python -c 'import torch'` to see the cause"
        ) from error
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    yield
    if not gc.isenabled():  # `tcverify.__main__` has put it off
        gc.freeze()
        gc.enable()


__all__ = ["START_PROCESSES", "begin_server", "importing"]
