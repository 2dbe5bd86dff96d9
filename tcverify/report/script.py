"""repro.py: a script that reproduces a finding with torch and tcverify alone."""

from __future__ import annotations

from pathlib import Path

from tcverify.cases.counterexample import Counterexample
from tcverify.program import Contract, dumps
from tcverify.registry.extensions import loaded_extensions
from tcverify.registry.op_laws import declared_op_laws
from tcverify.report.beside import FileReport
from tcverify.report.listing import graph_lines

_TEMPLATE = '''\
"""Reproduces a finding of tcverify. Run it where `tcverify run` found it, so that the pass can be imported."""

{imports}
from tcverify.replay import reproduce
{extensions}
# The original program as rank {rank} runs it:
#
{listing}

PASS = {target}
OPTIONS = {options}
CONTRACT = {contract}
KIND = {kind}
DOMAIN = {domain}
DEEP = {deep}
PASS_TIMEOUT = {pass_timeout}
PROGRAM = (
{program}
)

if __name__ == "__main__":
    raise SystemExit(
        reproduce(
            loads(PROGRAM), PASS, OPTIONS, CONTRACT, KIND, domain=DOMAIN, deep=DEEP, pass_timeout=PASS_TIMEOUT
        )
    )
'''


def to_script(case: Counterexample) -> str:
    """Return the text of repro.py. Foreign text (the pass, its options) appears only in quoted literals."""
    rank = case.finding.rank or 0
    lines = [f"#   {text}" for _, text in graph_lines(case.program, rank)]
    program = dumps(case.program)
    pieces = [ascii(program[i : i + 100]) for i in range(0, len(program), 100)]
    extensions = [_near(reference) for reference in loaded_extensions()]
    known = [
        *(f"load_extension({name!a})\n" for name in extensions),
        *(f"declare_op_law({law!a})\n" for law in declared_op_laws()),
    ]
    names = [*(["declare_op_law"] if declared_op_laws() else []), *(["load_extension"] if extensions else []), "loads"]
    return _TEMPLATE.format(
        imports=f"from tcverify import {', '.join(names)}",
        extensions="".join(["\n", *known]) if known else "",
        rank=int(rank),
        listing="\n".join(ascii(line.replace("→", "->"))[1:-1] for line in lines),
        target=ascii(case.facts.target),
        options=ascii(dict(case.facts.options)),
        contract=_promises(case.contract),
        kind=ascii(case.finding.kind),
        domain=ascii(case.domain),
        deep=case.deep,
        pass_timeout=case.pass_timeout,
        program="\n".join(f"    {piece}" for piece in pieces),
    )


def _near(reference: str) -> str:
    """An extension as named in the script: a file relative to the current directory, if it is below that."""
    path = Path(reference)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else reference


class ScriptReport(FileReport):
    """Writes repro.py next to every counterexample that can be replayed, and reports only failures; see `FileReport`."""

    name = "repro.py"

    def content(self, case: Counterexample) -> str | None:
        return to_script(case) if case.replayable else None


def _promises(contract: Contract) -> str:
    """The promises that differ from the defaults, to which others may be added."""
    made = {name: getattr(contract, name) for name in contract.__slots__}
    lines = [f"    {name!a}: {value!a},\n" for name, value in made.items() if value != getattr(Contract(), name)]
    return "{\n" + "".join(lines) + "}" if lines else "{}"
