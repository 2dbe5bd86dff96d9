"""Imports the code that does the work of a command, which takes seconds: after arguments are validated, and never for help."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from tcverify.errors import UsageError
from tcverify.system import start_server

#: Commands that apply passes or start ranks, and so need processes.
START_PROCESSES = ("run", "check", "replay")


def begin_server() -> None:
    """Start the process that others are forked from, unless it runs. It imports what this process imports, at the same time."""
    with contextlib.suppress(UsageError):  # the command reports it, if it starts a process at all
        start_server()


@contextlib.contextmanager
def importing(*, processes: bool = False) -> Iterator[None]:
    """Context for the import of the code that does the work of a command.

    Args:
        processes: whether the command starts processes.

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
    torch.set_num_threads(1)  # tensors are small: more threads would only wait for each other
    yield
    if not gc.isenabled():  # disabled in `tcverify.__main__`
        gc.freeze()
        gc.enable()


__all__ = ["START_PROCESSES", "begin_server", "importing"]
