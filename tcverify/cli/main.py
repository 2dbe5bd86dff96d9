"""The command line: run, check, replay, show, init, passes, doctor, worker.

What can be said without torch is said without it: versions, help, completions, what is wrong with options. Whatever takes
seconds to import, `tcverify.cli.verbs` first of all, is imported by the verbs that need it, once their arguments are found right.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from tcverify import __version__
from tcverify.cli import arguments
from tcverify.cli.settings import FAILED, INTERNAL, INTERRUPTED, UNUSABLE, Settings, new_seed
from tcverify.errors import InternalError, TcverifyError, UsageError
from tcverify.pytorch import PREFIX, SUBJECTS, installed_version
from tcverify.ray import LOCAL
from tcverify.registry.checks import CHECKS
from tcverify.registry.choices import CONDITIONS, DOMAINS, REPORTS, SIZES, DomainName, SizesName
from tcverify.registry.executors import EXECUTORS
from tcverify.registry.extensions import load_extension
from tcverify.registry.op_laws import declare_op_law
from tcverify.registry.passes import BUILTIN, DEFAULT, DESCRIPTIONS
from tcverify.registry.strategies import STRATEGIES
from tcverify.report.sanitize import error_text, sanitize
from tcverify.system import start_server
from tcverify.system.configuration import configuration, section

#: Verbs that apply passes or start ranks, which takes processes.
_START_PROCESSES = ("run", "check", "replay")


def _begin_server() -> None:
    """Start what processes are forked from, unless it runs: it imports what this process imports, one beside the other."""
    with contextlib.suppress(UsageError):  # the verb tells, if it comes to start a process
        start_server()


@contextlib.contextmanager
def _importing(*, processes: bool = False) -> Iterator[None]:
    """Stands around the import of what does the work of a verb, which takes seconds.

    Args:
        processes: whether the verb starts some.

    Raises:
        UsageError: torch cannot be imported.
    """
    if processes:
        _begin_server()
    try:
        import torch
    except (ImportError, OSError) as error:
        raise UsageError(f"torch cannot be imported: {error}", "see what `python -c 'import torch'` says") from error
    torch.set_num_threads(1)  # the tensors are small: more threads only wait for each other
    yield
    if not gc.isenabled():  # `tcverify.__main__` has put it off
        gc.freeze()
        gc.enable()


def _completing(
    known: Callable[[], Iterable[str]], separator: str = ","
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """What completes names in a shell, the last one where there are several; where none fits, it is left to the shell."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, between, last = incomplete.rpartition(separator)
        fitting = [CompletionItem(f"{before}{between}{name}") for name in known() if name.startswith(last)]
        return fitting or [CompletionItem(incomplete, type="file")]

    return complete


_complete_passes = _completing(lambda: (*BUILTIN, *(PREFIX + name for name in SUBJECTS)), "+")

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
    """Load the extensions that the configuration names, and these. Completions do without: they are to come at once."""
    if context.resilient_parsing:
        return
    configured = Path("pyproject.toml")
    if context.info_name in _START_PROCESSES and (references or "extension" in section(configured)):
        _begin_server()  # most extensions import torch
    arguments.load_configured_extensions(configured)
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


def _declare(context: click.Context, parameter: click.Parameter, laws: tuple[str, ...]) -> None:
    for law in laws:
        declare_op_law(law)


_OP_LAW = click.option("--op-law", multiple=True, metavar="OP=LAW", is_eager=True, expose_value=False, callback=_declare,
              help="What holds of an op without a meaning: my::op=rowwise(0), =pointwise or =linear.")  # fmt: skip

_CONFIRM = click.option("--confirm", metavar="[gloo|nccl|none]", callback=_executor, default="gloo", show_default=True,
              shell_complete=_completing(lambda: (*EXECUTORS, "none")),
              help="Process group that runs what lockstep does not refute.")  # fmt: skip
_DOMAIN = click.option("--domain", type=click.Choice(DOMAINS), default="float64", show_default=True,
              help="Also judge values exactly (in a prime field), or in the programs' native dtypes.")  # fmt: skip
_CHECKS = click.option("--checks", default=None, shell_complete=_completing(lambda: CHECKS),
              help=f"Checks to apply, of {', '.join(CHECKS)}. [default: all]")  # fmt: skip
_CONTRACT = click.option(
    "--contract", multiple=True, metavar="K=V", help="What the pass promises, e.g. idempotent=true."
)
_PASS_OPTION = click.option("--pass-option", multiple=True, metavar="K=V", help="Option of the passes' constructors.")
_BISECT = click.option("--bisect", is_flag=True, help="Name the rewrites of the pass that a finding comes from.")
_REPORT = click.option(
    "--report",
    default="html",
    show_default=True,
    shell_complete=_completing(lambda: REPORTS),
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
    verbs = {"run": run, "check": check}
    if context.invoked_subcommand in verbs:
        # one table serves both verbs: each takes the options that it has
        known = {verb: _options(command) for verb, command in verbs.items()}
        said = configuration(Path("pyproject.toml"), sorted(known["run"] | known["check"]))
        own = known[context.invoked_subcommand]
        context.default_map = {context.invoked_subcommand: {name: v for name, v in said.items() if name in own}}


def _options(command: click.Command) -> set[str]:
    """Names of the options of a verb that a configuration may set."""
    apart = ("passes", "sources", "extension", "op_law", "save")
    return {param.name for param in command.params if param.name is not None and param.name not in apart}


# ---------------------------------------------------------------------------------------------------------------- run


@main.command()
@click.argument("passes", nargs=-1, metavar="[PASS]...", shell_complete=_complete_passes)
@click.option("--world-size", default=None, help="Numbers of ranks, e.g. 2,4. [default: 2,3,4]")
@click.option("--mesh", default=None, help="One mesh for all programs, e.g. dp=2,tp=2, instead of drawn ones.")
@click.option(
    "--strategy",
    default=None,
    show_default="what suits the pass",
    shell_complete=_completing(lambda: STRATEGIES),
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
@_OP_LAW
@_REPORT_DIR
@click.option("--coverage/--no-coverage", default=True, show_default=True,
              help="Say which lines and conditions of the pass were never reached.")  # fmt: skip
@click.option("--search/--draw", default=True, show_default=True,
              help="Also try programs one edit away from those that showed something new of the pass.")  # fmt: skip
@click.option("--kernels", is_flag=True, help="Show the smallest programs that make the pass do what it does.")
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
    domain: DomainName,
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
    search: bool,
    kernels: bool,
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
    if any(":" in (named or "") for named in (strategy, checks)):
        _begin_server()  # they are modules of the user's, most of which import torch
    meshes = arguments.parse_meshes(world_size, mesh)
    drawn = arguments.parse_strategies(strategy, passes or DEFAULT)
    limit_s = arguments.parse_seconds(max_time) if max_time is not None else None
    settings = Settings(
        targets=[arguments.parse_target(name) for name in passes or DEFAULT],
        pass_options=arguments.parse_pairs(pass_option, "--pass-option"),
        promises=arguments.parse_pairs(contract, "--contract"),
        confirm=confirm,
        domain=domain,
        max_examples=max_examples if max_examples is not None else None if limit_s is not None else 200,
        max_time=limit_s,
        seed=seed if seed is not None else new_seed(),
        checks=arguments.parse_checks(checks),
        pass_timeout=pass_timeout,
        shrink_time=shrink_time,
        bisect=bisect,
        covered=[arguments.list_covered_modules(name) for name in passes or DEFAULT] if coverage else None,
        search=search,
        kernels=kernels,
        report_dir=report_dir,
        reports=arguments.parse_names(report, tuple(REPORTS), "report"),
        failing=arguments.parse_names(fail_on, CONDITIONS, "condition") if fail_on is not None else [],
        fail_fast=fail_fast,
        known=arguments.read_known_findings(baseline, write_baseline),
        baseline=baseline,
        write_baseline=write_baseline,
        corpus=corpus,
        workers=workers,
        ray=ray,
    )
    options = [arguments.list_option_draws(name, settings.pass_options) for name in passes or DEFAULT]
    with _importing(processes=True):
        from tcverify.cli import verbs
    raise SystemExit(verbs.run(settings, meshes, drawn, options))


# -------------------------------------------------------------------------------------------------------------- check


@main.command()
@click.argument("sources", nargs=-1, required=True, metavar="PROGRAM...")
@click.option("--pass", "passes", multiple=True, required=True, metavar="PASS", shell_complete=_complete_passes,
              help="The pass; repeatable.")  # fmt: skip
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
@click.option("--sizes", type=click.Choice(SIZES), default="auto", show_default=True,
              help="Run on the program's own sizes where they fit into memory, always, or never.")  # fmt: skip
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
@_OP_LAW
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
    sizes: SizesName,
    confirm: str,
    domain: DomainName,
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

    PROGRAM is a .pt2 file of torch.export, a tcverify program or counterexample (.json), a graph that torch.compile left
    (fx_graph_runnable, a TORCH_TRACE log, or a folder of these, one per rank), or module:function
    (path/to/file.py:function) that gives the graph of a rank: a GraphModule, (GraphModule, example inputs), an
    ExportedProgram, or what tcverify.capture gives. The function is called once per rank, each time in a process that
    believes to be that rank of a job. Several PROGRAMs are the graphs of the ranks in their order.
    """
    if ":" in (checks or ""):
        _begin_server()  # it is a module of the user's, most of which import torch
    dims, size = arguments.parse_one_mesh(world_size, mesh)
    groups = arguments.parse_groups(group)
    placements = arguments.parse_pairs(placement, "--placement")
    settings = Settings(
        targets=[arguments.parse_target(name) for name in passes],
        pass_options=arguments.parse_pairs(pass_option, "--pass-option"),
        promises=arguments.parse_pairs(contract, "--contract"),
        confirm=confirm,
        domain=domain,
        max_examples=draws,
        seed=seed,
        checks=arguments.parse_checks(checks),
        pass_timeout=pass_timeout,
        shrink_time=shrink_time,
        bisect=bisect,
        report_dir=report_dir,
        reports=arguments.parse_names(report, tuple(REPORTS), "report"),
        failing=arguments.parse_names(fail_on, CONDITIONS, "condition"),
        deep=True,
        earlier=False,  # they would be other programs
    )
    with _importing(processes=True):
        from tcverify.cli import verbs
    told = verbs.parse_user_facts(
        dims, size, groups, placements, rank_constant,
        rank=rank, spmd=spmd, seed=seed, timeout=capture_timeout,
    )  # fmt: skip
    raise SystemExit(verbs.check(settings, sources, told, save, sizes))


# ------------------------------------------------------------------------------------------------------------- worker


@main.command(context_settings={"ignore_unknown_options": True})
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="COMMAND...")
def worker(command: tuple[str, ...]) -> None:
    """Serve as a rank of the process groups of COMMAND, on as many machines as torchrun starts this on.

    COMMAND is run, check or replay with its arguments: torchrun --nnodes 2 … -m tcverify worker run PASS. The process of rank 0
    runs it, and its process groups are of the processes that torchrun has started.
    """
    if command[0] not in _START_PROCESSES:
        raise UsageError(f"a worker cannot serve '{command[0]}'", f"it serves {', '.join(_START_PROCESSES)}")
    with _importing():
        from tcverify.execution.process_group.torchrun_keeper import run_keeper
    raise SystemExit(run_keeper(command))


# ------------------------------------------------------------------------------------------------------- replay, show


@main.command()
@click.argument("cases", nargs=-1, metavar="[ID|FILE|DIR]...")
@_CONFIRM
@_BISECT
@_EXTENSION
@_OP_LAW
@_REPORT_DIR
def replay(cases: tuple[str, ...], confirm: str, bisect: bool, report_dir: Path) -> None:
    """Verify counterexamples again (default: all that are kept).

    Prints + FIXED, x FAILED or ! ERROR per case; of a single one what is found, and what the pass prints. Imports the
    passes that the files name.
    Exits with 1 when one still fails, else with 2 when one cannot be replayed.
    """
    with _importing(processes=True):
        from tcverify.cli import verbs
    raise SystemExit(verbs.replay(cases, confirm, report_dir, blame=bisect))


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
    with _importing():
        from tcverify.cli import verbs
    raise SystemExit(verbs.show_cases(cases, form, report_dir))


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


# ---------------------------------------------------------------------------------------------------- passes, doctor


@main.command()
def passes() -> None:
    """List the built-in passes, and those of PyTorch that this torch has."""
    from tcverify.report.console import make_console, say

    console = make_console()
    for name in BUILTIN:
        say(console, name, "bold")
        say(console, f"    {DESCRIPTIONS[name]}")
    say(console)
    say(console, f"PyTorch's own, of torch {installed_version()}:")
    for one in SUBJECTS.values():
        say(console, PREFIX + one.name, "bold" if one.here else "dim")
        say(console, f"    {one.what}" if one.here else f"    not in this torch; {one.versions}")
    say(console)
    say(console, "Your own: module:attribute or path/to/file.py:attribute (a class, an instance or a function).")
    say(console, "Several, one after the other: first+second.")


@main.command(name="doctor")
def diagnose() -> None:
    """Say what this machine can run, with one real collective."""
    with _importing():
        from tcverify.cli import verbs
    raise SystemExit(verbs.diagnose())


if __name__ == "__main__":
    main()
