"""The command line: run, replay, show, passes, doctor."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tcverify import __version__
from tcverify.application import Guarded
from tcverify.application.loading import importable_target
from tcverify.campaign import Campaign, CampaignFinished, Plan
from tcverify.checks import CHECKS
from tcverify.counterexample import (
    encode_counterexample,
    environment,
    find_counterexamples,
    read_counterexample,
    write_atomically,
)
from tcverify.errors import InternalError, TcverifyError, UsageError
from tcverify.execution import ProcessGroupPool
from tcverify.passes import BUILTIN, DESCRIPTIONS
from tcverify.program import Mesh
from tcverify.replay import replay as replay_case
from tcverify.report.markdown import to_markdown
from tcverify.report.script import ScriptReport
from tcverify.report.terminal import TerminalReport, show
from tcverify.strategies import STRATEGIES

PASSED, FAILED, UNUSABLE, INTERNAL, INTERRUPTED = 0, 1, 2, 3, 130

STATE_DIR = Path(".tcverify")


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
            # Whoever read our output has left (`tcverify run | head`); keep the interpreter from complaining again at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            context.exit(FAILED)
        except TcverifyError as error:
            if debug:
                traceback.print_exc()
            click.echo(f"Error: {error}", err=True)
            context.exit(INTERNAL if isinstance(error, InternalError) else UNUSABLE)
        except Exception as error:  # noqa: BLE001 - the last resort: no traceback without --debug
            if debug:
                traceback.print_exc()
            click.echo(f"Error: {InternalError(f'{type(error).__name__}: {error}')}", err=True)
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
    context.default_map = {"run": _configuration(Path("pyproject.toml"))}


def _configuration(path: Path) -> dict[str, Any]:
    """Read defaults for `run` from [tool.tcverify]."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text()).get("tool", {}).get("tcverify", {})
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    known = {param.name for param in run.params} - {"passes"}
    options = {key.replace("-", "_"): value for key, value in table.items()}
    unknown = sorted(set(options) - {name for name in known if name is not None})
    if unknown:
        raise UsageError(
            f"[tool.tcverify] in {path} has unknown keys {', '.join(unknown)}",
            f"keys are {', '.join(sorted(map(str, known)))}",
        )
    return options


def _pairs(values: Sequence[str], option: str) -> dict[str, str]:
    pairs = {}
    for value in values:
        key, separator, text = value.partition("=")
        if not separator or not key:
            raise UsageError(f"{option} {value} is not of the form name=value")
        pairs[key] = text
    return pairs


def _names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",") if name.strip()] if text is not None else None


def _console() -> Console:
    # Off a terminal, lines are as wide as COLUMNS says, or as they are.
    return Console(highlight=False, soft_wrap=False)


# ---------------------------------------------------------------------------------------------------------------- run


@main.command()
@click.argument("passes", nargs=-1, metavar="[PASS]...")
@click.option("--world-size", default=None, help="Numbers of ranks, e.g. 2,4. [default: 2,3,4]")
@click.option("--mesh", default=None, help="One mesh for all programs, e.g. dp=2,tp=2, instead of drawn ones.")
@click.option("--strategy", default="structured", show_default=True, help="What programs are drawn.")
@click.option("--confirm", type=click.Choice(["gloo", "nccl", "none"]), default="gloo", show_default=True,
              help="Process group that runs what lockstep does not refute.")  # fmt: skip
@click.option("--max-examples", type=click.IntRange(1), default=None, help="Programs per pass and mesh. [default: 200]")
@click.option("--max-time", default=None, help="Time per pass and mesh, e.g. 90s, 30m, 8h.")
@click.option("--seed", type=click.IntRange(0), default=None, help="Seed of the drawing. [default: a new one]")
@click.option("--checks", default=None, help=f"Checks to apply, of {', '.join(CHECKS)}. [default: all]")
@click.option("--contract", multiple=True, metavar="K=V", help="What the pass promises, e.g. idempotent=true.")
@click.option("--pass-option", multiple=True, metavar="K=V", help="Option of the passes' constructors.")
@click.option("--pass-timeout", type=click.FloatRange(0.1), default=20.0, show_default=True,
              help="Seconds that one application of a pass may take.")  # fmt: skip
@click.option("--report-dir", type=click.Path(path_type=Path), default=Path("reports"), show_default=True,
              help="Where counterexamples are written.")  # fmt: skip
@click.option("--fail-on", default=None, help="Also fail on: inconclusive.")
@click.option("-x", "fail_fast", is_flag=True, help="Stop at the first finding.")
def run(
    passes: tuple[str, ...],
    world_size: str | None,
    mesh: str | None,
    strategy: str,
    confirm: str,
    max_examples: int | None,
    max_time: str | None,
    seed: int | None,
    checks: str | None,
    contract: tuple[str, ...],
    pass_option: tuple[str, ...],
    pass_timeout: float,
    report_dir: Path,
    fail_on: str | None,
    fail_fast: bool,
) -> None:
    """Verify passes on drawn programs (default: all built-in passes).

    PASS is a built-in name, module:attribute, or path/to/file.py:attribute.
    """
    meshes = _meshes(world_size, mesh)
    if strategy not in STRATEGIES:
        raise UsageError(f"there is no strategy '{strategy}'", f"strategies are {', '.join(STRATEGIES)}")
    chosen = _names(checks)
    for name in chosen or ():
        if name not in CHECKS:
            raise UsageError(f"there is no check '{name}'", f"checks are {', '.join(CHECKS)}")
    failing = _names(fail_on) or []
    if set(failing) - {"inconclusive", "vacuity"}:
        raise UsageError(f"--fail-on {fail_on}: a run can fail on inconclusive, and always fails on vacuity")
    seconds = _seconds(max_time) if max_time is not None else None
    limit = max_examples if max_examples is not None else None if seconds is not None else 200
    options = _pairs(pass_option, "--pass-option")
    promises = _pairs(contract, "--contract")
    targets = [_target(name) for name in passes or tuple(BUILTIN)]
    _require_writable(report_dir)
    _require_writable(STATE_DIR)
    console = _console()
    report = TerminalReport(console, report_dir)
    seed = seed if seed is not None else int.from_bytes(os.urandom(4), "little")
    device = "cuda" if confirm == "nccl" else "cpu"
    interrupted = False
    with contextlib.ExitStack() as stack:
        stack.callback(report.close)
        subjects = [stack.enter_context(Guarded(t, options, timeout=pass_timeout)) for t in targets]
        contracts = [subject.contract.with_options(promises) for subject in subjects]
        for name, fixed, size in meshes:
            pool = None
            if confirm != "none":
                pool = stack.enter_context(ProcessGroupPool(size, device=device))
                pool.start()
            for subject, promised in zip(subjects, contracts, strict=True):
                programs = STRATEGIES[strategy](mesh=fixed, world_size=size)
                plan = Plan(
                    programs, name, report_dir, STATE_DIR, limit, seconds, seed, promised, chosen, fail_fast=fail_fast
                )
                finished = Campaign(subject, plan, pool, [report, ScriptReport(report_dir)]).run()
                interrupted = finished.stop == "interrupted"
                if interrupted or (fail_fast and finished.counterexamples):
                    break
            if pool is not None:
                pool.close()
            if interrupted or (fail_fast and report.finished[-1].counterexamples):
                break
        report.summary()
        report.phases()
    raise SystemExit(INTERRUPTED if interrupted else _exit_code(report.finished, failing))


def _exit_code(finished: Sequence[CampaignFinished], failing: Sequence[str]) -> int:
    if any(event.verdict != "passed" for event in finished):
        return FAILED
    if "inconclusive" in failing and any(event.statistics.inconclusive for event in finished):
        return FAILED
    return PASSED


def _target(name: str) -> str:
    """Resolve a built-in name; anything else must look like module:attribute."""
    if name in BUILTIN:
        return importable_target(BUILTIN[name]) or name
    if ":" not in name:
        raise UsageError(
            f"there is no built-in pass '{name}'",
            f"built-in passes are {', '.join(BUILTIN)}; your own is named as module:attribute or path/to/file.py:attribute",
        )
    return name


def _meshes(world_size: str | None, mesh: str | None) -> list[tuple[str, Mesh | None, int]]:
    """Return (name, mesh or None for drawn ones, world size)."""
    if mesh is not None:
        if world_size is not None:
            raise UsageError("--mesh and --world-size exclude each other", "the mesh says how many ranks there are")
        sizes: dict[str, int] = {}
        for key, text in _pairs(mesh.split(","), "--mesh").items():
            if not text.isdigit() or int(text) < 1:
                raise UsageError(f"--mesh {mesh}: '{text}' is not a number of ranks")
            sizes[key] = int(text)
        fixed = Mesh.grid(sizes)
        _require_ranks(fixed.world_size)
        return [(mesh, fixed, fixed.world_size)]
    found: list[tuple[str, Mesh | None, int]] = []
    for text in (world_size or "2,3,4").split(","):
        if not text.strip().isdigit():
            raise UsageError(f"--world-size {world_size}: '{text}' is not a number of ranks")
        size = int(text)
        _require_ranks(size)
        found.append((f"{size} ranks", None, size))
    return found


def _require_ranks(size: int) -> None:
    if size < 2:
        raise UsageError(f"a world of {size} has no collectives to verify", "use at least 2 ranks")
    if size > 64:
        raise UsageError(f"{size} ranks are more than a campaign draws programs for", "use at most 64 ranks")


def _seconds(text: str) -> float:
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        seconds = float(number) * units[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e8:
        raise UsageError(f"--max-time {text} is not a time", "write 90s, 30m or 8h")
    return seconds


def _require_writable(directory: Path) -> None:
    probe = directory / ".writable"
    write_atomically(probe, "")
    probe.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------- replay, show


@main.command()
@click.argument("cases", nargs=-1, metavar="[ID|FILE|DIR]...")
@click.option("--confirm", type=click.Choice(["gloo", "nccl", "none"]), default="gloo", show_default=True)
@click.option("--report-dir", type=click.Path(path_type=Path), default=Path("reports"), show_default=True)
def replay(cases: tuple[str, ...], confirm: str, report_dir: Path) -> None:
    """Verify counterexamples again (default: all in the report directory).

    Prints + FIXED, x FAILED or ! ERROR per case. Exits with 1 when one still fails, else 2 when one cannot be replayed.
    """
    paths = [path for case in cases or (str(report_dir),) for path in find_counterexamples(case, report_dir)]
    console = _console()
    states = set()
    with _pools(confirm) as pools:
        for path in paths:
            try:
                case = read_counterexample(path)
                outcome = replay_case(case, pools(case.program.world_size))
            except TcverifyError as error:
                console.print(Text(f"! ERROR  {path}: {error}", style="yellow"), soft_wrap=True)
                states.add("error")
                continue
            states.add(outcome.state)
            mark, style = {
                "fixed": ("+ FIXED ", "green"),
                "failed": ("x FAILED", "red"),
                "error": ("! ERROR ", "yellow"),
            }[outcome.state]
            console.print(Text(f"{mark} {case.id}  {case.facts.name}: {outcome.message}", style=style), soft_wrap=True)
            if outcome.source_changed:
                console.print("  the source of the pass has changed since the case was found", soft_wrap=True)
            if outcome.case is not None:
                show(console, outcome.case, path.parent.parent)
    raise SystemExit(FAILED if "failed" in states else UNUSABLE if "error" in states else PASSED)


@contextlib.contextmanager
def _pools(confirm: str) -> Iterator[Any]:
    """Yield a function that gives the pool of a world size, or None when nothing confirms."""
    pools: dict[int, ProcessGroupPool] = {}

    def pool(world_size: int) -> ProcessGroupPool | None:
        if confirm == "none":
            return None
        if world_size not in pools:
            pools[world_size] = ProcessGroupPool(world_size, device="cuda" if confirm == "nccl" else "cpu")
        return pools[world_size]

    try:
        yield pool
    finally:
        for one in pools.values():
            one.close()


@main.command(name="show")
@click.argument("case")
@click.option("--format", "form", type=click.Choice(["text", "md", "json"]), default="text", show_default=True)
@click.option("--report-dir", type=click.Path(path_type=Path), default=Path("reports"), show_default=True)
def show_case(case: str, form: str, report_dir: Path) -> None:
    """Show a counterexample again, given its ID or file."""
    for path in find_counterexamples(case, report_dir):
        found = read_counterexample(path)
        if form == "json":
            click.echo(json.dumps(encode_counterexample(found), indent=1))
        elif form == "md":
            click.echo(to_markdown(found, path.parent.parent))
        else:
            show(_console(), found, path.parent.parent)


# ---------------------------------------------------------------------------------------------------- passes, doctor


@main.command()
def passes() -> None:
    """List the built-in passes."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("pass", no_wrap=True)
    table.add_column("what it does")
    for name in BUILTIN:
        table.add_row(name, DESCRIPTIONS[name])
    console = _console()
    console.print(table)
    console.print("\nYour own: module:attribute or path/to/file.py:attribute (a class, an instance or a function).")


@main.command()
def doctor() -> None:
    """Say what this machine can run, with one real collective."""
    console = _console()
    facts: Mapping[str, str] = environment()
    for name, value in facts.items():
        console.print(f"{name:<12}{value}")
    console.print(f"{'cores':<12}{len(os.sched_getaffinity(0))}")
    gloo = dist.is_available() and dist.is_gloo_available()
    cuda = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = dist.is_available() and dist.is_nccl_available() and cuda > 0
    console.print(f"{'gloo':<12}{'available' if gloo else 'not in this torch'}")
    console.print(
        f"{'nccl':<12}{f'available, {cuda} devices' if nccl else 'not here: no CUDA device or no NCCL in this torch'}"
    )
    if not gloo:
        raise UsageError("this torch has no gloo", "install a torch built with it, or run with --confirm none")
    problem = _try_collective()
    console.print(f"{'all_reduce':<12}{problem or 'works on 2 gloo ranks'}")
    raise SystemExit(FAILED if problem else PASSED)


def _try_collective() -> str | None:
    """Run one all_reduce in lockstep and on two gloo ranks; the problem, or None."""
    from tcverify import PARTIAL, InputSpec, Lockstep, spmd_program

    x = InputSpec("x", (4,), placements=(("tp", PARTIAL),))
    mesh = Mesh.grid({"tp": 2})
    program = spmd_program(mesh, [x], lambda b: b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp")))
    try:
        with ProcessGroupPool(2) as pool:
            real = pool.run(program)
    except TcverifyError as error:
        return f"fails: {error}"
    expected = Lockstep().run(program)
    for mine, theirs in zip(expected.ranks, real.ranks, strict=True):
        if theirs.error is not None or not torch_equal(mine.outputs[0], theirs.outputs[0]):
            return f"gives another result than lockstep on rank {mine.rank}"
    return None


def torch_equal(a: Any, b: Any) -> bool:
    """Whether two tensors agree to rounding."""
    return bool((a - b).abs().max() <= 1e-12)


if __name__ == "__main__":
    main()
