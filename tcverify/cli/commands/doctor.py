"""tcverify doctor: report what this machine can run."""

from __future__ import annotations

import click

from tcverify.cli.importing import importing
from tcverify.cli.settings import FAILED, PASSED


@click.command()
def doctor() -> None:
    """Report what this machine can run, and test one real collective."""
    with importing():
        from tcverify.cli import machine
        from tcverify.report.console import make_console, say
    console = make_console()
    for name, value in machine.facts().items():
        say(console, f"{name:<12}{value}")
    machine.require_backend("gloo")
    problem = machine.try_collective()
    say(console, f"{'all_reduce':<12}{problem or 'works on 2 gloo ranks'}")
    raise SystemExit(FAILED if problem else PASSED)
