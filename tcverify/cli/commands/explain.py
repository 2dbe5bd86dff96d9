"""tcverify explain: what a term of the output, or a kind of finding, means."""

from __future__ import annotations

import difflib

import click

from tcverify.cli import options
from tcverify.cli.importing import importing
from tcverify.errors import UsageError
from tcverify.registry.glossary import GLOSSARY, explained, terms


def _known() -> list[str]:
    from tcverify.program import KINDS

    return [*terms(), *KINDS]


@click.command()
@click.argument("term", nargs=-1, shell_complete=options.completing(_known))
def explain(term: tuple[str, ...]) -> None:
    """Explain a term of the output, or a kind of finding.

    Without TERM, all are listed.

    \b
    tcverify explain divergence
    tcverify explain wrong-value
    """
    with importing():
        from tcverify.program import KINDS
        from tcverify.report.console import make_console, say
    console = make_console()
    word = " ".join(term)
    if not word:
        for name, text in {**GLOSSARY, **KINDS}.items():
            say(console, name, "bold")
            say(console, f"    {text}")
        return
    meaning = KINDS.get(word) or explained(word)
    if meaning is None:
        near = difflib.get_close_matches(word.lower(), _known(), n=1)
        hint = f"did you mean '{near[0]}'?" if near else "`tcverify explain` lists all terms"
        raise UsageError(f"there is no term '{word}'", hint)
    say(console, f"{word}: {meaning}")
