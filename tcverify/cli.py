"""The command line: run, check, replay, show, init, passes, doctor."""

from __future__ import annotations

import errno
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from tcverify import __version__, arguments, doctor, template
from tcverify.arithmetic import DOMAINS
from tcverify.capturing import RankRule, Told, load
from tcverify.checks import CHECKS
from tcverify.configuration import configuration
from tcverify.counterexample import (
    encode_counterexample,
    find_counterexamples,
    read_counterexample,
)
from tcverify.division import Drawing
from tcverify.errors import InternalError, TcverifyError, UsageError
from tcverify.execution import EXECUTORS, Executor, executors
from tcverify.execution.keeper import keep
from tcverify.extensions import load_extension
from tcverify.extra.pytorch import PREFIX, SUBJECTS
from tcverify.extra.ray import LOCAL
from tcverify.files import write_atomically
from tcverify.passes import BUILTIN, DEFAULT, DESCRIPTIONS
from tcverify.program import dumps
from tcverify.replay import replay as replay_case
from tcverify.report.choice import REPORTS
from tcverify.report.html import to_gallery, to_html
from tcverify.report.markdown import to_markdown
from tcverify.report.plain import error_text, plain, plain_lines
from tcverify.report.terminal import make_console, say, show
from tcverify.report.text import WIDTH, to_text
from tcverify.report.trace import to_trace
from tcverify.running import (
    FAILED,
    INTERNAL,
    INTERRUPTED,
    PASSED,
    UNUSABLE,
    Job,
    Settings,
    campaigns,
    described,
    new_seed,
    prepare,
    redrawn,
)
from tcverify.strategies import STRATEGIES

_REPORT_DIR = click.option(
    "--report-dir",
    type=click.Path(path_type=Path),
    default=Path("reports"),
    show_default=True,
    help="Where counterexamples are kept.",
)


def _executor(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """The name of an executor, also of one that an extension registers, or none."""
    known = [*EXECUTORS, "none"]
    if value not in known:
        raise click.BadParameter(f"{value!r} is not one of {', '.join(map(repr, known))}.", context, parameter)
    return value


def _load(context: click.Context, parameter: click.Parameter, references: tuple[str, ...]) -> None:
    for reference in references:
        load_extension(reference)


_EXTENSION = click.option(
    "--extension",
    multiple=True,
    metavar="MODULE",
    is_eager=True,
    expose_value=False,
    callback=_load,
    help="A module, or a .py file, that registers dialects, checks, strategies or executors.",
)

_CONFIRM = click.option("--confirm", metavar="[gloo|nccl|none]", callback=_executor, default="gloo", show_default=True,
              help="Process group that runs what lockstep does not refute.")  # fmt: skip
_DOMAIN = click.option("--domain", type=click.Choice(DOMAINS), default="float64", show_default=True,
              help="Also judge values exactly (in a prime field), or in the programs' native dtypes.")  # fmt: skip
_CHECKS = click.option("--checks", default=None, help=f"Checks to apply, of {', '.join(CHECKS)}. [default: all]")
_CONTRACT = click.option(
    "--contract", multiple=True, metavar="K=V", help="What the pass promises, e.g. idempotent=true."
)
_PASS_OPTION = click.option("--pass-option", multiple=True, metavar="K=V", help="Option of the passes' constructors.")
_BISECT = click.option("--bisect", is_flag=True, help="Name the rewrites of the pass that a finding comes from.")
_REPORT = click.option(
    "--report",
    default="html",
    show_default=True,
    help=f"What is written beside counterexamples, of {', '.join(REPORTS)}.",
)


#: What the system says when a file cannot take more.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _silence() -> None:
    """Keep the interpreter from complaining at its exit that standard output takes nothing, as we have done already."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Group(click.Group):
    """Turns errors into one message and an exit code."""

    def invoke(self, context: click.Context) -> Any:
        debug = context.params.get("debug", False)
        try:
            return super().invoke(context)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            context.exit(INTERRUPTED)
        except BrokenPipeError:
            _silence()  # whoever read our output has left (`tcverify run | head`)
            context.exit(FAILED)
        except TcverifyError as error:
            if debug:
                traceback.print_exc()
            click.echo(error_text(error), err=True)
            context.exit(INTERNAL if isinstance(error, InternalError) else UNUSABLE)
        except Exception as error:  # noqa: BLE001 - the last resort: no traceback without --debug
            if debug:
                traceback.print_exc()
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                where = f"{error.filename}: " if error.filename else ""
                click.echo(error_text(UsageError(f"{where}{error.strerror}", "make room and run again")), err=True)
                context.exit(UNUSABLE)
            click.echo(error_text(InternalError(f"{type(error).__name__}: {error}")), err=True)
            click.echo("  run again with `tcverify --debug …` for the traceback", err=True)
            context.exit(INTERNAL)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tcverify")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Verify compiler passes that rewrite graphs with collectives.

    Exit codes: 0 passed, 1 refuted or nothing tested, 2 unusable input, 3 internal error, 130 interrupted.
    """
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    if context.invoked_subcommand in ("run", "check", "replay", "show"):
        arguments.configured_extensions(Path("pyproject.toml"))
    verbs = {"run": run, "check": check}
    if context.invoked_subcommand in verbs:
        # one table serves both verbs: each takes the options that it has
        known = {verb: _options(command) for verb, command in verbs.items()}
        said = configuration(Path("pyproject.toml"), sorted(known["run"] | known["check"]))
        own = known[context.invoked_subcommand]
        context.default_map = {context.invoked_subcommand: {name: v for name, v in said.items() if name in own}}


def _options(command: click.Command) -> set[str]:
    """Names of the options of a verb that a configuration may set."""
    apart = ("passes", "sources", "extension", "save")
    return {param.name for param in command.params if param.name is not None and param.name not in apart}


# ---------------------------------------------------------------------------------------------------------------- run


@main.command()
@click.argument("passes", nargs=-1, metavar="[PASS]...")
@click.option("--world-size", default=None, help="Numbers of ranks, e.g. 2,4. [default: 2,3,4]")
@click.option("--mesh", default=None, help="One mesh for all programs, e.g. dp=2,tp=2, instead of drawn ones.")
@click.option(
    "--strategy",
    default=None,
    show_default="what suits the pass",
    help=f"What programs are drawn, from one or several of {', '.join(STRATEGIES)}.",
)
@_CONFIRM
@_DOMAIN
@click.option("--max-examples", type=click.IntRange(1), default=None, help="Programs per pass and mesh. [default: 200]")
@click.option("--max-time", default=None, help="Time per pass and mesh, e.g. 90s, 30m, 8h.")
@click.option("--seed", type=click.IntRange(0), default=None, help="Seed of the drawing. [default: a new one]")
@_CHECKS
@_CONTRACT
@_PASS_OPTION
@click.option("--pass-timeout", type=click.FloatRange(0.1), default=20.0, show_default=True,
              help="Seconds that one application of a pass may take.")  # fmt: skip
@click.option("--shrink-time", type=click.FloatRange(0), default=30.0, show_default=True,
              help="Seconds to shrink a finding.")  # fmt: skip
@_BISECT
@click.option("--workers", type=click.IntRange(1, 1024), default=None,
              help="Processes that share the programs. [default: 1; with --ray, as many as there are CPUs]")  # fmt: skip
@click.option("--ray", is_flag=False, flag_value=LOCAL, default=None, metavar="[ADDRESS]",
              help="Share the programs on a Ray cluster; local, or no address: one of this machine.")  # fmt: skip
@click.option("--corpus", type=click.Path(path_type=Path), default=None, metavar="DIR",
              help="Cases to try first; programs that show something new are added. Machines may share it.")  # fmt: skip
@_EXTENSION
@_REPORT_DIR
@click.option("--coverage/--no-coverage", default=True, show_default=True,
              help="Say which lines and conditions of the pass were never reached.")  # fmt: skip
@click.option("--fail-on", default=None, help="Also fail on: inconclusive, vacuity.")
@click.option("-x", "--fail-fast", is_flag=True, help="Stop at the first finding that is not known.")
@_REPORT
@click.option(
    "--baseline", type=click.Path(path_type=Path), default=None, help="Known findings, which do not fail the run."
)
@click.option(
    "--write-baseline", type=click.Path(path_type=Path), default=None, help="Add what is found to this baseline."
)
def run(
    passes: tuple[str, ...],
    world_size: str | None,
    mesh: str | None,
    strategy: str | None,
    confirm: str,
    domain: str,
    max_examples: int | None,
    max_time: str | None,
    seed: int | None,
    checks: str | None,
    contract: tuple[str, ...],
    pass_option: tuple[str, ...],
    pass_timeout: float,
    shrink_time: float,
    bisect: bool,
    workers: int | None,
    ray: str | None,
    corpus: Path | None,
    report_dir: Path,
    coverage: bool,
    fail_on: str | None,
    fail_fast: bool,
    report: str,
    baseline: Path | None,
    write_baseline: Path | None,
) -> None:
    """Verify passes on drawn programs (default: the built-in ones).

    PASS is a built-in name, module:attribute, or path/to/file.py:attribute; FIRST+SECOND is a pipeline of such. The default is
    every built-in pass, and some of them one after the other.
    """
    meshes = arguments.meshes(world_size, mesh)
    drawn = arguments.strategies(strategy, passes or DEFAULT)
    limit_s = arguments.seconds(max_time) if max_time is not None else None
    settings = Settings(
        targets=[arguments.target(name) for name in passes or DEFAULT],
        pass_options=arguments.pairs(pass_option, "--pass-option"),
        promises=arguments.pairs(contract, "--contract"),
        confirm=confirm,
        domain=domain,
        max_examples=max_examples if max_examples is not None else None if limit_s is not None else 200,
        max_time=limit_s,
        seed=seed if seed is not None else new_seed(),
        checks=arguments.checks(checks),
        pass_timeout=pass_timeout,
        shrink_time=shrink_time,
        bisect=bisect,
        covered=[arguments.covered(name) for name in passes or DEFAULT] if coverage else None,
        report_dir=report_dir,
        reports=arguments.names(report, list(REPORTS), "report"),
        failing=arguments.names(fail_on, ["inconclusive", "vacuity"], "condition") if fail_on is not None else [],
        fail_fast=fail_fast,
        known=arguments.known_findings(baseline, write_baseline),
        baseline=baseline,
        write_baseline=write_baseline,
        corpus=corpus,
        workers=workers,
        ray=ray,
    )
    console = make_console()
    prepare(settings, console)
    options = [arguments.draws(name, settings.pass_options) for name in passes or DEFAULT]
    jobs = []
    for name, fixed, size in meshes:
        sizes = {dim.name: len(dim.groups[0]) for dim in fixed.dims} if fixed is not None else None
        drawings = [Drawing(one, size, sizes, told) for one, told in zip(drawn, options, strict=True)]
        jobs.append(Job(name, size, drawings=drawings))
    raise SystemExit(campaigns(settings, jobs, console))


# -------------------------------------------------------------------------------------------------------------- check


@main.command()
@click.argument("sources", nargs=-1, required=True, metavar="PROGRAM...")
@click.option("--pass", "passes", multiple=True, required=True, metavar="PASS", help="The pass; repeatable.")
@click.option("--world-size", default=None, help="Number of ranks.")
@click.option("--mesh", default=None, help="The mesh, e.g. dp=2,tp=2.")
@click.option("--group", multiple=True, metavar="NAME=DIM|RANKS",
              help="What a group in the graph is: a mesh dim (3=tp), or ranks (3=0,1;2,3).")  # fmt: skip
@click.option("--placement", multiple=True, metavar="INPUT=DIM:PLACEMENT",
              help="How an input lies on the ranks, e.g. x=dp:shard(0); else it is equal on all.")  # fmt: skip
@click.option(
    "--spmd", is_flag=True, help="One graph, of --rank, stands for all ranks: module:function is called once."
)
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Whose graph a single one is.")
@click.option("--rank-constant", multiple=True, metavar="NODE.ARG=RULE",
              help="An integer that depends on the rank, e.g. slice_1.2=4*tp.")  # fmt: skip
@click.option("--capture-timeout", type=click.FloatRange(1), default=300.0, show_default=True,
              help="Seconds that capturing the graph of a rank may take.")  # fmt: skip
@_CONFIRM
@_DOMAIN
@click.option("--draws", type=click.IntRange(1), default=2, show_default=True, help="How often values are drawn.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the values.")
@_CHECKS
@_CONTRACT
@_PASS_OPTION
@click.option("--pass-timeout", type=click.FloatRange(0.1), default=120.0, show_default=True,
              help="Seconds that one application of a pass may take.")  # fmt: skip
@click.option("--shrink-time", type=click.FloatRange(0), default=120.0, show_default=True,
              help="Seconds to shrink a finding.")  # fmt: skip
@_BISECT
@_EXTENSION
@_REPORT_DIR
@click.option("--fail-on", default="inconclusive", show_default=True, help="Also fail on: inconclusive, vacuity.")
@_REPORT
@click.option(
    "--save", type=click.Path(path_type=Path), default=None, help="Also write the program to this .json file."
)
def check(
    sources: tuple[str, ...],
    passes: tuple[str, ...],
    world_size: str | None,
    mesh: str | None,
    group: tuple[str, ...],
    placement: tuple[str, ...],
    spmd: bool,
    rank: int,
    rank_constant: tuple[str, ...],
    capture_timeout: float,
    confirm: str,
    domain: str,
    draws: int,
    seed: int,
    checks: str | None,
    contract: tuple[str, ...],
    pass_option: tuple[str, ...],
    pass_timeout: float,
    shrink_time: float,
    bisect: bool,
    report_dir: Path,
    fail_on: str,
    report: str,
    save: Path | None,
) -> None:
    """Verify passes on one program of yours.

    PROGRAM is a .pt2 file of torch.export, a tcverify program or counterexample (.json), or module:function
    (path/to/file.py:function) that gives the graph of a rank: a GraphModule, (GraphModule, example inputs), an
    ExportedProgram, or what tcverify.capture gives. The function is called once per rank, each time in a process that
    believes to be that rank of a job. Several PROGRAMs are the graphs of the ranks in their order.
    """
    known_mesh, size = arguments.one_mesh(world_size, mesh)
    told = Told(
        known_mesh, size, arguments.groups(group), arguments.placements(placement),
        [RankRule.parse(text) for text in rank_constant], rank, spmd, seed, capture_timeout,
    )  # fmt: skip
    settings = Settings(
        targets=[arguments.target(name) for name in passes],
        pass_options=arguments.pairs(pass_option, "--pass-option"),
        promises=arguments.pairs(contract, "--contract"),
        confirm=confirm,
        domain=domain,
        max_examples=draws,
        seed=seed,
        checks=arguments.checks(checks),
        pass_timeout=pass_timeout,
        shrink_time=shrink_time,
        bisect=bisect,
        report_dir=report_dir,
        reports=arguments.names(report, list(REPORTS), "report"),
        failing=arguments.names(fail_on, ["inconclusive", "vacuity"], "condition"),
        deep=True,
        earlier=False,  # they would be other programs
    )
    console = make_console()
    prepare(settings, console)
    loaded = load(sources, told)
    for line in (*described(loaded.program), *loaded.notes):
        say(console, plain(line))
    if save is not None:
        write_atomically(save, dumps(loaded.program) + "\n", "choose another place with --save")
    name = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
    job = Job(
        f"{name}, {loaded.program.world_size} ranks",
        loaded.program.world_size,
        programs=[redrawn(loaded.program, draws)] * len(passes),
    )
    raise SystemExit(campaigns(settings, [job], console))


# ------------------------------------------------------------------------------------------------------------- worker


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def worker(command: tuple[str, ...]) -> None:
    """Serve as a rank of the process groups of COMMAND, on as many machines as torchrun starts this on.

    COMMAND is run, check or replay with its arguments: torchrun --nnodes 2 … -m tcverify worker run PASS. The process of rank 0
    runs it, and its process groups are of the processes that torchrun has started.
    """
    verbs = ("run", "check", "replay")
    if command[0] not in verbs:
        raise UsageError(f"a worker cannot serve '{command[0]}'", f"it serves {', '.join(verbs)}")
    raise SystemExit(keep(command))


# ------------------------------------------------------------------------------------------------------- replay, show


@main.command()
@click.argument("cases", nargs=-1, metavar="[ID|FILE|DIR]...")
@_CONFIRM
@_BISECT
@_EXTENSION
@_REPORT_DIR
def replay(cases: tuple[str, ...], confirm: str, bisect: bool, report_dir: Path) -> None:
    """Verify counterexamples again (default: all that are kept).

    Prints + FIXED, x FAILED or ! ERROR per case; of a single one what is found, and what the pass prints. Imports the
    passes that the files name.
    Exits with 1 when one still fails, else with 2 when one cannot be replayed.
    """
    paths = [path for case in cases or (str(report_dir),) for path in find_counterexamples(case, report_dir)]
    doctor.require_backend(confirm)
    console = make_console()
    states = []
    with executors(confirm) as executor_of:
        for path in paths:
            states.append(_replay_one(path, executor_of, alone=len(paths) == 1, blame=bisect))
    if len(paths) > 1:
        say(console, ", ".join(f"{states.count(state)} {state}" for state in _MARKS))
    raise SystemExit(FAILED if "failed" in states else UNUSABLE if "error" in states else PASSED)


_MARKS = {"fixed": ("+ FIXED ", "green"), "failed": ("x FAILED", "red"), "error": ("! ERROR ", "yellow")}


def _replay_one(path: Path, executor_of: Callable[[int], Executor | None], *, alone: bool, blame: bool) -> str:
    console = make_console()

    def tell(state: str, what: str, message: str) -> None:
        mark, style = _MARKS[state]
        first, *rest = plain_lines(message) or [""]
        say(console, f"{mark} {what}: {first}", style)
        for line in rest:
            say(console, f"  {line}")

    try:
        case = read_counterexample(path)
        outcome = replay_case(case, executor_of(case.program.world_size), blame=blame)
    except TcverifyError as error:
        tell("error", "not replayed", str(error))
        return "error"
    tell(outcome.state, f"{case.id} {plain(case.facts.name)}", outcome.message)
    if outcome.source_changed:
        say(console, "  the source of the pass has changed since the case was found")
    if outcome.printed and alone:
        say(console, "  what the pass has printed, on all ranks:")
        for line in plain_lines(outcome.printed):
            say(console, f"    {line}")
    if outcome.case is not None and alone:
        say(console)
        show(console, outcome.case, None)
    return outcome.state


@main.command(name="show")
@click.argument("cases", nargs=-1, required=True, metavar="ID|FILE|DIR...")
@click.option("--format", "form", type=click.Choice(["text", "md", "html", "json", "trace"]), default="text",
              show_default=True)  # fmt: skip
@_EXTENSION
@_REPORT_DIR
def show_cases(cases: tuple[str, ...], form: str, report_dir: Path) -> None:
    """Show counterexamples again: as text for logs, as Markdown for issues, as a page, which several share.

    Text is coloured and as wide as the terminal; where there is none, it is plain and 80 columns wide, or as COLUMNS says.
    """
    paths = [path for case in cases for path in find_counterexamples(case, report_dir)]
    if form == "trace" and len(paths) > 1:
        raise UsageError(f"these are {len(paths)} counterexamples, a trace shows one", "give the file or the ID of one")
    if form == "html" and len(paths) > 1:
        click.echo(to_gallery(paths, Path(cases[0]) if len(cases) == 1 else Path()))
        return
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
    if damaged:
        raise SystemExit(UNUSABLE)


# ------------------------------------------------------------------------------------------------------------- init


@main.command()
@click.argument("directory", type=click.Path(path_type=Path), default=Path(), metavar="[DIR]")
@click.option(
    "--pass", "passes", multiple=True, metavar="PASS", help="A pass to verify; repeatable. [default: an example]"
)
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
@click.option("--keep", is_flag=True, help="Leave files that are there as they are, and write the others.")
@click.option("--dry-run", is_flag=True, help="Write nothing, say what would be written.")
def init(directory: Path, passes: tuple[str, ...], force: bool, keep: bool, dry_run: bool) -> None:
    """Write tests, a tox matrix and a GitHub workflow that verify the passes of a repository.

    DIR is the root of the repository, by default the current directory. PASS is named as for `tcverify run`.
    """
    if force and keep:
        raise UsageError(
            "--force and --keep exclude each other", "one overwrites what is there, the other leaves it alone"
        )
    planned = template.plan(directory, passes)
    console = make_console()
    for line in template.told(planned) if dry_run else template.done(planned, planned.write(force=force, keep=keep)):
        say(console, plain(line))


# ---------------------------------------------------------------------------------------------------- passes, doctor


@main.command()
def passes() -> None:
    """List the built-in passes, and those of PyTorch that this torch has."""
    console = make_console()
    for name in BUILTIN:
        say(console, name, "bold")
        say(console, f"    {DESCRIPTIONS[name]}")
    say(console)
    say(console, f"PyTorch's own, of torch {torch.__version__}:")
    for one in SUBJECTS.values():
        say(console, PREFIX + one.name, "bold" if one.here else "dim")
        say(console, f"    {one.what}" if one.here else f"    not in this torch; {one.versions}")
    say(console)
    say(console, "Your own: module:attribute or path/to/file.py:attribute (a class, an instance or a function).")
    say(console, "Several, one after the other: first+second.")


@main.command(name="doctor")
def diagnose() -> None:
    """Say what this machine can run, with one real collective."""
    console = make_console()
    for name, value in doctor.facts().items():
        say(console, f"{name:<12}{value}")
    doctor.require_backend("gloo")
    problem = doctor.try_collective()
    say(console, f"{'all_reduce':<12}{problem or 'works on 2 gloo ranks'}")
    raise SystemExit(FAILED if problem else PASSED)


if __name__ == "__main__":
    main()
