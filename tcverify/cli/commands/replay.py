"""tcverify replay: verify counterexamples again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tcverify.cli import options
from tcverify.cli.importing import importing
from tcverify.cli.settings import FAILED, PASSED, UNUSABLE
from tcverify.errors import TcverifyError
from tcverify.report.sanitize import sanitize, sanitize_lines

if TYPE_CHECKING:
    from tcverify.cases.counterexample import Counterexample
    from tcverify.execution import Executor

#: How the result of a replay is displayed.
_MARKS = {"fixed": ("+ FIXED ", "green"), "failed": ("x FAILED", "red"), "error": ("! ERROR ", "yellow")}


@click.command()
@click.argument("cases", nargs=-1, metavar="[ID|FILE|DIR]...")
@options.confirm
@options.bisect
@options.extension
@options.op_law
@options.report_dir
def replay(cases: tuple[str, ...], confirm: str, bisect: bool, report_dir: Path) -> None:
    """Verify counterexamples again (default: all in the report directory).

    Prints + FIXED, x FAILED or ! ERROR per case; for a single case also the finding and the output of the pass. Imports
    the passes that the files name. Exits with 1 if a case still fails, else with 2 if one cannot be replayed.
    """
    with importing(processes=True):
        from tcverify.cases.counterexample import find_counterexamples
        from tcverify.cli.machine import require_backend
        from tcverify.execution import executors
        from tcverify.report.console import make_console, say
    paths = [path for case in cases or (str(report_dir),) for path in find_counterexamples(case, report_dir)]
    require_backend(confirm)
    states = []
    with executors(confirm) as executor_of:
        for path in paths:
            states.append(
                _replay_one(path, executor_of, alone=len(paths) == 1, blame=bisect, confirm=confirm != "none")
            )
    if len(paths) > 1:
        say(make_console(), ", ".join(f"{states.count(state)} {state}" for state in _MARKS))
    raise SystemExit(FAILED if "failed" in states else UNUSABLE if "error" in states else PASSED)


def _replay_one(
    path: Path, executor_of: Callable[[int], Executor | None], *, alone: bool, blame: bool, confirm: bool
) -> str:
    """Verify one case again and print its state: a key of `_MARKS`.

    Args:
        confirm: repeat the trial in PyTorch's public API, if the case has one.
    """
    from tcverify.cases.counterexample import read_counterexample
    from tcverify.replay import replay_case
    from tcverify.report.console import make_console, say
    from tcverify.report.terminal import show

    console = make_console()

    def tell(state: str, what: str, message: str) -> None:
        mark, style = _MARKS[state]
        first, *rest = sanitize_lines(message) or [""]
        say(console, f"{mark} {what}: {first}", style)
        for line in rest:
            say(console, f"  {line}")

    try:
        case = read_counterexample(path)
        outcome = replay_case(case, executor_of(case.program.world_size), blame=blame)
    except TcverifyError as error:
        tell("error", "not replayed", str(error))
        return "error"
    tell(outcome.state, f"{case.id} {sanitize(case.facts.name)}", outcome.message)
    if outcome.case is not None and case.end_to_end is not None and confirm:
        outcome = replace(outcome, case=_tried(outcome.case))
    if outcome.source_changed:
        say(console, "  the source of the pass has changed since the case was found")
    if outcome.printed and alone:
        say(console, "  output of the pass, on all ranks:")
        for line in sanitize_lines(outcome.printed):
            say(console, f"    {line}")
    if outcome.case is not None and alone:
        say(console)
        show(console, outcome.case, None)
    return outcome.state


def _tried(case: Counterexample) -> Counterexample:
    from tcverify.pytorch.end_to_end import try_end_to_end

    return replace(case, end_to_end=try_end_to_end(case))
