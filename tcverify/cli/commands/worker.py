"""tcverify worker: serve as a rank of the process groups of another command."""

from __future__ import annotations

import click

from tcverify.cli.importing import START_PROCESSES, importing
from tcverify.errors import UsageError


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def worker(command: tuple[str, ...]) -> None:
    """Serve as a rank of COMMAND's process groups, on the machines that torchrun uses.

    COMMAND is run, check or replay with its arguments: torchrun --nnodes 2 … -m tcverify worker run PASS. The process of rank 0
    runs it; its process groups consist of the processes that torchrun started.
    """
    if command[0] not in START_PROCESSES:
        raise UsageError(f"a worker cannot serve '{command[0]}'", f"it serves {', '.join(START_PROCESSES)}")
    with importing():
        from tcverify.execution.process_group.torchrun_keeper import run_keeper
    raise SystemExit(run_keeper(command))
