"""Verification of graphs of everyday models at their real sizes: seconds by phase, memory, verdicts.

    python benchmarks/production.py [--layers N] [--mesh 8x8] [--only llama-tp]

Each graph is captured, read, given to each pass, and verified in lockstep, in a separate process.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

PASSES = ("identity", "torch:bucket_collectives", "torch:schedule_overlap_bucketing", "sequence_parallel")


def measure(path: Path, target: str, mesh: str) -> dict[str, object]:
    """Read one graph and verify a pass on it, in this process."""
    from tcverify.application import Guarded
    from tcverify.capturing import UserFacts, load
    from tcverify.cli import arguments
    from tcverify.program import Mesh
    from tcverify.verification.verifier import verify

    start = time.perf_counter()
    dp, tp = map(int, mesh.split("x"))
    told = UserFacts(Mesh.grid({"dp": dp, "tp": tp}), groups=groups_of(path))
    program = load([str(path)], told).program
    read = time.perf_counter() - start
    with Guarded(arguments.parse_target(target), timeout=900) as subject:
        verdict = verify(subject, program)
    return {
        "nodes": program.size,
        "ranks": program.world_size,
        "status": verdict.status,
        "why": [doubt.reason for doubt in verdict.doubts] + [finding.kind for finding in verdict.findings],
        "changed": verdict.changed,
        "seconds": {"read": read, **verdict.seconds},
        "total": time.perf_counter() - start,
        "gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def groups_of(path: Path) -> dict[str, str]:
    """Which mesh dim each group of a graph is: those of dp were made before those of tp."""
    text = path.read_text()
    names = [name for name in map(str, range(200)) if f"'{name}'" in text]
    dims = ["dp", "tp"] if len(names) > 1 else ["tp" if "llama-tp" in path.name else "dp"]
    return dict(zip(names, dims, strict=False))


@click.command()
@click.option("--layers", type=int)
@click.option("--mesh", default="8x8")
@click.option("--only")
@click.option("--passes", default=",".join(PASSES))
@click.option("--one", nargs=2, hidden=True)
def main(layers: int | None, mesh: str, only: str | None, passes: str, one: tuple[str, str] | None) -> None:
    """Print one row per graph and pass."""
    if one:
        click.echo(json.dumps(measure(Path(one[0]), one[1], mesh)))
        return
    from production_models import FAMILIES

    dp, tp = mesh.split("x")
    table = Table("graph", "nodes", "ranks", "pass", "verdict", "seconds", "GiB", "read · apply · scale · run · check")
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES if only is None else [only]:
            command = [sys.executable, str(Path(__file__).with_name("production_models.py")), family, folder]
            command += ["--dp", dp, "--tp", tp, *(["--layers", str(layers)] if layers is not None else [])]
            subprocess.run(command, check=True, capture_output=True)
        for path in sorted(Path(folder).iterdir()):
            for target in passes.split(","):
                run = subprocess.run(
                    [sys.executable, __file__, "--mesh", mesh, "--one", str(path), target],
                    capture_output=True,
                    text=True,
                    check=False,
                )
                name = path.stem.removeprefix("fx_graph_runnable_")
                if run.returncode:
                    table.add_row(name, "", "", target, f"died: {run.stderr.strip().splitlines()[-1:]}")
                    continue
                row = json.loads(run.stdout.splitlines()[-1])
                seconds = row["seconds"]
                phases = " · ".join(
                    f"{seconds.get(p, 0):.1f}" for p in ("read", "apply", "scaling", "lockstep", "checks")
                )
                verdict = f"{row['status']}{', changed' if row['changed'] else ''} {' '.join(row['why'])}"
                table.add_row(
                    name,
                    str(row["nodes"]),
                    str(row["ranks"]),
                    target,
                    verdict,
                    f"{row['total']:.1f}",
                    f"{row['gib']:.1f}",
                    phases,
                )
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
