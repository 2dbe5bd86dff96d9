"""tcverify check: verify passes on a program of the user."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tcverify.cli import arguments, options
from tcverify.cli.importing import importing
from tcverify.cli.settings import Settings
from tcverify.errors import ProgramError, UsageError
from tcverify.registry.choices import SIZES, SizesName

if TYPE_CHECKING:
    from tcverify.program import Placement


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="PROGRAM...")
@click.option("--pass", "passes", multiple=True, required=True, metavar="PASS", shell_complete=options.complete_passes,
              help="The pass; repeatable.")  # fmt: skip
@click.option("--world-size", default=None, help="Number of ranks.")
@click.option("--mesh", default=None, help="The mesh, e.g. dp=2,tp=2.")
@click.option("--group", multiple=True, metavar="NAME=DIM|RANKS", callback=options.read_by(arguments.parse_groups),
              help="Ranks of a group in the graph: a mesh dim (3=tp), or lists of ranks (3=0,1;2,3).")  # fmt: skip
@click.option("--placement", multiple=True, metavar="INPUT=DIM:PLACEMENT",
              callback=options.read_by(lambda values: arguments.parse_pairs(values, "--placement")),
              help="Placement of an input, e.g. x=dp:shard(0). [default: unknown]")  # fmt: skip
@click.option("--spmd", is_flag=True, help="Use the graph of --rank for all ranks: module:function is called once.")
@click.option(
    "--rank", type=click.IntRange(0), default=0, show_default=True, help="Rank to which a single graph belongs."
)
@click.option("--rank-constant", multiple=True, metavar="NODE.ARG=RULE",
              help="Argument whose value depends on the rank, e.g. slice_1.2=4*tp.")  # fmt: skip
@click.option("--capture-timeout", type=click.FloatRange(1), default=300.0, show_default=True,
              help="Time limit for capturing the graph of a rank, in seconds.")  # fmt: skip
@click.option("--sizes", type=click.Choice(SIZES), default="auto", show_default=True,
              help="Run at the original sizes: if they fit into memory (auto), always (real), never (small).")  # fmt: skip
@options.confirm
@options.domain
@click.option(
    "--draws", type=click.IntRange(1), default=2, show_default=True, help="Number of times that input values are drawn."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the values.")
@options.verification(pass_timeout=120.0, shrink_time=120.0)
@options.strict
@options.extension
@options.op_law
@options.report_dir
@options.fail_on("inconclusive")
@options.report
@click.option(
    "--save", type=click.Path(path_type=Path), default=None, help="Also write the program to this .json file."
)
def check(
    sources: tuple[str, ...],
    passes: tuple[str, ...],
    world_size: str | None,
    mesh: str | None,
    group: dict[str, str | list[tuple[int, ...]]],
    placement: dict[str, str],
    spmd: bool,
    rank: int,
    rank_constant: tuple[str, ...],
    capture_timeout: float,
    sizes: SizesName,
    draws: int,
    save: Path | None,
    **given: Any,
) -> None:
    """Verify passes on one program of your own.

    PROGRAM is a .pt2 file of torch.export, a tcverify program or counterexample (.json), a graph that torch.compile wrote
    (fx_graph_runnable, a TORCH_TRACE log, or a folder of these, one per rank), or module:function
    (path/to/file.py:function) that returns the graph of a rank: a GraphModule, (GraphModule, example inputs), an
    ExportedProgram, or the result of tcverify.capture. The function is called once per rank, each time in a process that
    acts as that rank of a job. Several PROGRAMs are the graphs of the ranks, in order.
    """
    dims, world = arguments.parse_one_mesh(world_size, mesh)
    settings = Settings(
        targets=[arguments.parse_target(name) for name in passes],
        max_examples=draws,
        deep=True,
        earlier=False,  # they would be different programs
        **given,
    )
    with importing(processes=True):
        from tcverify.capturing import RankRule, UserFacts, load
        from tcverify.cli.running import MeshJob, describe_program, draw_with_seeds, prepare_directories, run_campaigns
        from tcverify.program import Mesh, dumps
        from tcverify.report.console import make_console, say
        from tcverify.report.sanitize import sanitize
        from tcverify.system.files import write_atomically
    told = UserFacts(
        Mesh.grid(dims) if dims is not None else None, world, group, _placements(placement),
        [RankRule.parse(rule) for rule in rank_constant], rank, spmd, settings.seed, capture_timeout,
    )  # fmt: skip
    console = make_console()
    prepare_directories(settings, console)
    loaded = load(sources, told)
    for line in (*describe_program(loaded.program), *loaded.notes):
        say(console, sanitize(line))
    if save is not None:
        write_atomically(save, dumps(loaded.program) + "\n", "choose another path with --save")
    program = replace(loaded.program, sizes=sizes)
    name = sources[0] if len(sources) == 1 else f"{sources[0]} and {len(sources) - 1} more"
    job = MeshJob(
        f"{name}, {program.world_size} ranks",
        program.world_size,
        programs=[draw_with_seeds(program, draws)] * len(passes),
    )
    raise SystemExit(run_campaigns(settings, [job], console).code)


def _placements(given: Mapping[str, str]) -> dict[str, dict[str, Placement]]:
    """Parse DIM:PLACEMENT, several separated by commas, for each input. Raises UsageError."""
    from tcverify.program import Placement

    found: dict[str, dict[str, Placement]] = {}
    for name, text in given.items():
        of_input = found[name] = {}
        for part in text.split(","):
            dim, separator, placement = part.strip().partition(":")
            try:
                if not separator:
                    raise ProgramError(f"'{part}' names no mesh dim")
                of_input[dim] = Placement.parse(placement.strip())
            except ProgramError as error:
                hint = error.hint or "write INPUT=DIM:PLACEMENT, e.g. x=dp:shard(0)"
                raise UsageError(f"--placement {name}={text}: {error.message}", hint) from None
    return found
