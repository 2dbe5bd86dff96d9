"""What the verbs of the command line do, once their arguments are read. Each returns the exit code."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from tcverify.capturing import RankRule, UserFacts, load
from tcverify.cases.counterexample import encode_counterexample, find_counterexamples, read_counterexample
from tcverify.cli import doctor
from tcverify.cli.running import MeshJob, describe_program, draw_with_seeds, prepare_directories, run_campaigns
from tcverify.cli.settings import FAILED, PASSED, UNUSABLE, Settings
from tcverify.errors import ProgramError, TcverifyError, UsageError
from tcverify.execution import Executor, executors
from tcverify.program import Mesh, Placement, dumps
from tcverify.registry.choices import SizesName
from tcverify.replay import replay_case
from tcverify.report.console import make_console, say
from tcverify.report.html import to_gallery, to_html
from tcverify.report.markdown import to_markdown
from tcverify.report.sanitize import error_text, sanitize, sanitize_lines
from tcverify.report.terminal import show
from tcverify.report.text import WIDTH, to_text
from tcverify.report.trace import to_trace
from tcverify.system.files import write_atomically
from tcverify.workers import DrawPlan


def run(
    settings: Settings,
    meshes: Sequence[tuple[str, Mapping[str, int] | None, int]],
    strategies: Sequence[str | None],
    options: Sequence[Mapping[str, Sequence[Any]]],
) -> int:
    """Verify passes on drawn programs.

    Args:
        meshes: as `arguments.parse_meshes` reads them.
        strategies: of each pass; None: what suits it is to be found out.
        options: of each pass, values that are drawn with the programs.
    """
    console = make_console()
    prepare_directories(settings, console)
    jobs = []
    for name, sizes, size in meshes:
        drawings = [DrawPlan(one, size, sizes, told) for one, told in zip(strategies, options, strict=True)]
        jobs.append(MeshJob(name, size, drawings=drawings))
    return run_campaigns(settings, jobs, console)


def parse_user_facts(
    sizes: Mapping[str, int] | None,
    world_size: int | None,
    groups: Mapping[str, str | Sequence[tuple[int, ...]]],
    placements: Mapping[str, str],
    rules: Sequence[str],
    *,
    rank: int,
    spmd: bool,
    seed: int,
    timeout: float,
) -> UserFacts:
    """Return what the user says of graphs beside themselves.

    Args:
        sizes: of the dims of the mesh.
        placements: of each input, as --placement takes them behind the =.
        rules: as --rank-constant takes them.

    Raises:
        UsageError: a placement is none.
        ProgramError: a rule is none.
    """
    mesh = Mesh.grid(sizes) if sizes is not None else None
    read = {name: _placements(name, text) for name, text in placements.items()}
    return UserFacts(
        mesh, world_size, groups, read, [RankRule.parse(rule) for rule in rules], rank, spmd, seed, timeout
    )


def _placements(name: str, text: str) -> dict[str, Placement]:
    """Read DIM:PLACEMENT, several separated by commas."""
    found: dict[str, Placement] = {}
    for part in text.split(","):
        dim, separator, placement = part.strip().partition(":")
        try:
            if not separator:
                raise ProgramError(f"'{part}' does not say over which mesh dim")
            found[dim] = Placement.parse(placement.strip())
        except ProgramError as error:
            hint = error.hint or "write INPUT=DIM:PLACEMENT, e.g. x=dp:shard(0)"
            raise UsageError(f"--placement {name}={text}: {error.message}", hint) from None
    return found


def check(settings: Settings, sources: Sequence[str], told: UserFacts, save: Path | None, sizes: SizesName) -> int:
    """Verify passes on one program.

    Args:
        settings: `max_examples` says how often its values are drawn.
        sizes: what it runs on.
        save: where the program is written, too.
    """
    console = make_console()
    prepare_directories(settings, console)
    loaded = load(sources, told)
    for line in (*describe_program(loaded.program), *loaded.notes):
        say(console, sanitize(line))
    if save is not None:
        write_atomically(save, dumps(loaded.program) + "\n", "choose another place with --save")
    program = replace(loaded.program, sizes=sizes)
    name = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
    job = MeshJob(
        f"{name}, {program.world_size} ranks",
        program.world_size,
        programs=[draw_with_seeds(program, settings.max_examples or 1)] * len(settings.targets),
    )
    return run_campaigns(settings, [job], console)


def replay(cases: Sequence[str], confirm: str, report_dir: Path, *, blame: bool) -> int:
    """Verify counterexamples again.

    Args:
        cases: none: all in `report_dir`.
        blame: whether the rewrites that a finding comes from are named.
    """
    paths = [path for case in cases or (str(report_dir),) for path in find_counterexamples(case, report_dir)]
    doctor.require_backend(confirm)
    console = make_console()
    states = []
    with executors(confirm) as executor_of:
        for path in paths:
            states.append(_replay_one(path, executor_of, alone=len(paths) == 1, blame=blame))
    if len(paths) > 1:
        say(console, ", ".join(f"{states.count(state)} {state}" for state in _MARKS))
    return FAILED if "failed" in states else UNUSABLE if "error" in states else PASSED


_MARKS = {"fixed": ("+ FIXED ", "green"), "failed": ("x FAILED", "red"), "error": ("! ERROR ", "yellow")}


def _replay_one(path: Path, executor_of: Callable[[int], Executor | None], *, alone: bool, blame: bool) -> str:
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
    if outcome.source_changed:
        say(console, "  the source of the pass has changed since the case was found")
    if outcome.printed and alone:
        say(console, "  what the pass has printed, on all ranks:")
        for line in sanitize_lines(outcome.printed):
            say(console, f"    {line}")
    if outcome.case is not None and alone:
        say(console)
        show(console, outcome.case, None)
    return outcome.state


def show_cases(cases: Sequence[str], form: str, report_dir: Path) -> int:
    """Show counterexamples again, in a form that --format takes."""
    paths = [path for case in cases for path in find_counterexamples(case, report_dir)]
    if form == "trace" and len(paths) > 1:
        raise UsageError(f"these are {len(paths)} counterexamples, a trace shows one", "give the file or the ID of one")
    if form == "html" and len(paths) > 1:
        click.echo(to_gallery(paths, Path(cases[0]) if len(cases) == 1 else Path()))
        return PASSED
    console = make_console()
    damaged = False
    for number, path in enumerate(paths):
        try:
            found = read_counterexample(path)
        except TcverifyError as error:
            if len(paths) == 1:
                raise
            click.echo(error_text(error), err=True)  # the others are shown all the same
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
        else:
            if number:
                click.echo()
            if console.is_terminal:
                show(console, found, path)
            else:
                click.echo(to_text(found, path, console.width if "COLUMNS" in os.environ else WIDTH))
    return UNUSABLE if damaged else PASSED


def diagnose() -> int:
    """Say what this machine can run, with one real collective."""
    console = make_console()
    for name, value in doctor.facts().items():
        say(console, f"{name:<12}{value}")
    doctor.require_backend("gloo")
    problem = doctor.try_collective()
    say(console, f"{'all_reduce':<12}{problem or 'works on 2 gloo ranks'}")
    return FAILED if problem else PASSED


__all__ = ["check", "diagnose", "parse_user_facts", "replay", "run", "show_cases"]
