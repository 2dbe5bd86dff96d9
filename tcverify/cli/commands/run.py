"""tcverify run: verify passes on drawn programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from tcverify.cli import arguments, options
from tcverify.cli.importing import begin_server, importing
from tcverify.cli.settings import Settings, new_seed
from tcverify.ray import LOCAL
from tcverify.registry.choices import HOSTILE, HostileName
from tcverify.registry.passes import DEFAULT
from tcverify.registry.strategies import STRATEGIES, world_sizes_of


@click.command()
@click.argument("passes", nargs=-1, metavar="[PASS]...", shell_complete=options.complete_passes)
@click.option(
    "--world-size",
    default=None,
    help="Numbers of ranks, e.g. 2,4. [default: 2,3,4, and more where programs are of whole tensors]",
)
@click.option("--mesh", default=None, help="One mesh for all programs, e.g. dp=2,tp=2. [default: drawn meshes]")
@click.option(
    "--strategy",
    default=None,
    show_default="strategies that fit the pass",
    shell_complete=options.completing(lambda: STRATEGIES),
    help=f"Strategies that generate the programs, any of {', '.join(STRATEGIES)}.",
)
@click.option("--hostile", default=None, shell_complete=options.completing(lambda: HOSTILE),
              callback=options.read_by(lambda text: arguments.parse_names(text, HOSTILE, "name"), absent=()),
              help="Also draw programs that no well-behaved compiler hands to a pass: metadata (missing or wrong).")  # fmt: skip
@options.confirm
@options.domain
@click.option("--max-examples", type=click.IntRange(1), default=None, help="Programs per pass and mesh. [default: 200]")
@click.option("--max-time", default=None, callback=options.read_by(arguments.parse_seconds),
              help="Time per pass and mesh, e.g. 90s, 30m, 8h.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=new_seed, help="Seed of the programs. [default: random]")
@options.verification(pass_timeout=20.0, shrink_time=30.0)
@options.strict
@click.option("--workers", type=click.IntRange(1, 1024), default=None,
              help="Processes that share the programs. [default: 1; with --ray, as many as there are CPUs]")  # fmt: skip
@click.option("--ray", is_flag=False, flag_value=LOCAL, default=None, metavar="[ADDRESS]",
              help="Share the programs on a Ray cluster; local, or no address: a new cluster on this machine.")  # fmt: skip
@click.option("--corpus", type=click.Path(path_type=Path), default=None, metavar="DIR",
              help="Cases to try first; programs with new behaviour are added. Machines may share the directory.")  # fmt: skip
@options.extension
@options.op_law
@options.report_dir
@click.option("--coverage/--no-coverage", default=True, show_default=True,
              help="Report which lines and conditions of the pass were never reached.")  # fmt: skip
@click.option("--search/--draw", default=True, show_default=True,
              help="Also try programs one edit away from those with new behaviour, or only draw programs.")  # fmt: skip
@click.option("--kernels", is_flag=True, help="Show the smallest program for each behaviour of the pass.")
@options.fail_on(None)
@click.option("-x", "--fail-fast", is_flag=True, help="Stop at the first finding that is not in the baseline.")
@options.report
@click.option(
    "--baseline",
    type=click.Path(path_type=Path),
    default=None,
    help="File of known findings, which do not fail the run.",
)
@click.option(
    "--write-baseline", type=click.Path(path_type=Path), default=None, help="Add the findings to this baseline."
)
def run(
    passes: tuple[str, ...],
    world_size: str | None,
    mesh: str | None,
    strategy: str | None,
    hostile: Sequence[HostileName],
    max_examples: int | None,
    coverage: bool,
    **given: Any,
) -> None:
    """Verify passes on drawn programs (default: the built-in passes).

    PASS is a built-in name, module:attribute, or path/to/file.py:attribute; FIRST+SECOND is a pipeline. The default is
    `passes` of [tool.tcverify], else every built-in pass and some pipelines of them.
    """
    if ":" in (strategy or ""):
        begin_server()  # it is a module of the user, and most of these import torch
    names = passes or DEFAULT
    strategies = arguments.parse_strategies(strategy, names)
    meshes = arguments.parse_meshes(world_size, mesh, default=world_sizes_of(strategies))
    settings = Settings(
        targets=[arguments.parse_target(name) for name in names],
        max_examples=200 if max_examples is None and given["max_time"] is None else max_examples,
        covered=[arguments.list_covered_modules(name) for name in names] if coverage else None,
        known=arguments.read_known_findings(given["baseline"], given["write_baseline"]),
        **given,
    )
    drawn = [arguments.list_option_draws(name, settings.pass_option) for name in names]
    with importing(processes=True):
        from tcverify.cli.running import MeshJob, prepare_directories, run_campaigns
        from tcverify.report.console import make_console
        from tcverify.workers import DrawPlan
    console = make_console()
    prepare_directories(settings, console)
    jobs = []
    for name, sizes, size in meshes:
        drawings = [DrawPlan(one, size, sizes, values, hostile) for one, values in zip(strategies, drawn, strict=True)]
        jobs.append(MeshJob(name, size, drawings=drawings))
    raise SystemExit(run_campaigns(settings, jobs, console).code)
