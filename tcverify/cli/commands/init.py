"""tcverify init: set up verification of the passes of a repository."""

from __future__ import annotations

from pathlib import Path

import click

from tcverify.errors import UsageError
from tcverify.report.sanitize import sanitize


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), default=Path(), metavar="[DIR]")
@click.option(
    "--pass", "passes", multiple=True, metavar="PASS", help="A pass to verify; repeatable. [default: an example]"
)
@click.option("--force", is_flag=True, help="Overwrite existing files.")
@click.option("--keep", is_flag=True, help="Skip existing files, and write the others.")
@click.option("--dry-run", is_flag=True, help="Write nothing; show what would be written.")
def init(directory: Path, passes: tuple[str, ...], force: bool, keep: bool, dry_run: bool) -> None:
    """Write tests, a tox matrix and a GitHub workflow that verify the passes of a repository.

    DIR is the root of the repository, by default the current directory. PASS is named as for `tcverify run`.
    """
    if force and keep:
        raise UsageError("--force and --keep exclude each other", "one overwrites existing files, the other skips them")
    from tcverify.cli import template
    from tcverify.report.console import make_console, say

    planned = template.plan_template(directory, passes)
    console = make_console()
    for line in (
        template.describe_plan(planned)
        if dry_run
        else template.describe_result(planned, planned.write(force=force, keep=keep))
    ):
        say(console, sanitize(line))
