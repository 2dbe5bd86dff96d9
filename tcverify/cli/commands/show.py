"""tcverify show: show counterexamples."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tcverify.cli import options
from tcverify.cli.importing import importing
from tcverify.cli.settings import PASSED, UNUSABLE
from tcverify.errors import TcverifyError, UsageError
from tcverify.report.sanitize import error_text

if TYPE_CHECKING:
    from tcverify.cases.counterexample import Counterexample


FORMATS = ("text", "md", "html", "json", "trace", "pytorch-issue")


@click.command()
@click.argument("cases", nargs=-1, required=True, metavar="ID|FILE|DIR...")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@options.extension
@options.report_dir
def show(cases: tuple[str, ...], form: str, report_dir: Path) -> None:
    """Show counterexamples: as text for logs, as Markdown for issues, or as an HTML page (one for several cases).

    pytorch-issue, of a case of a torch: subject, is an issue for PyTorch with a script that needs torch alone.

    Text is coloured and as wide as the terminal; elsewhere it is plain and 80 columns wide, or $COLUMNS.
    """
    with importing():
        from tcverify.cases.counterexample import encode_counterexample, find_counterexamples, read_counterexample
        from tcverify.report import terminal
        from tcverify.report.console import make_console
        from tcverify.report.html import to_gallery, to_html
        from tcverify.report.markdown import to_markdown
        from tcverify.report.text import WIDTH, to_text
        from tcverify.report.trace import to_trace
    paths = [path for case in cases for path in find_counterexamples(case, report_dir)]
    if form in ("trace", "pytorch-issue") and len(paths) > 1:
        what = "a trace" if form == "trace" else "an issue"
        raise UsageError(f"{what} shows one counterexample, not {len(paths)}", "give one file or ID")
    if form == "html" and len(paths) > 1:
        click.echo(to_gallery(paths, Path(cases[0]) if len(cases) == 1 else Path()))
        raise SystemExit(PASSED)
    console = make_console()
    damaged = False
    for number, path in enumerate(paths):
        try:
            found = read_counterexample(path)
        except TcverifyError as error:
            if len(paths) == 1:
                raise
            click.echo(error_text(error), err=True)  # the other counterexamples are still shown
            damaged = True
            continue
        if form == "json":
            click.echo(json.dumps(encode_counterexample(found), indent=1))
        elif form == "md":
            click.echo(f"\n---\n\n{to_markdown(found, path)}" if number else to_markdown(found, path))
        elif form == "html":
            click.echo(to_html(found, path))
        elif form == "trace":
            click.echo(to_trace(found), nl=False)
        elif form == "pytorch-issue":
            click.echo(_issue(found))
        else:
            if number:
                click.echo()
            if console.is_terminal:
                terminal.show(console, found, path)
            else:
                click.echo(to_text(found, path, console.width if "COLUMNS" in os.environ else WIDTH))
    raise SystemExit(UNUSABLE if damaged else PASSED)


def _issue(case: Counterexample) -> str:
    with importing():
        from tcverify.pytorch.end_to_end.issue import to_issue
    return to_issue(case)
