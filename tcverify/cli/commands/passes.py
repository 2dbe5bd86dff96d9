"""tcverify passes: list the passes that have a name."""

from __future__ import annotations

import click

from tcverify.pytorch import PREFIX, SUBJECTS, installed_version
from tcverify.registry.passes import BUILTIN, DESCRIPTIONS


@click.command()
def passes() -> None:
    """List the built-in passes, and the passes of PyTorch in this torch."""
    from tcverify.report.console import make_console, say

    console = make_console()
    for name in BUILTIN:
        say(console, name, "bold")
        say(console, f"    {DESCRIPTIONS[name]}")
    say(console)
    say(console, f"Passes of PyTorch, in torch {installed_version()}:")
    for one in SUBJECTS.values():
        say(console, PREFIX + one.name, "bold" if one.here else "dim")
        say(console, f"    {one.what}" if one.here else f"    not in this torch; {one.versions}")
    say(console)
    say(console, "Your own passes: module:attribute or path/to/file.py:attribute (a class, an instance or a function).")
    say(console, "A pipeline: first+second.")
