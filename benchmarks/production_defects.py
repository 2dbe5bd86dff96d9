"""Defects planted into real rewrites of graphs of everyday models, at their real sizes and numbers of ranks.

    python benchmarks/production_defects.py [--mesh 8x8] [--layers N] [--only NAME]

Each pass here buckets or schedules collectives as PyTorch does, and then makes one mistake; the same pass without the mistake has
to pass. `tcverify check` judges them as a user would. Printed: the verdict, how many nodes the counterexample has, and seconds.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import torch
from production import groups_of
from rich.console import Console
from rich.table import Table
from torch import fx

functional = torch.ops._c10d_functional

BUCKETS, SCHEDULE = "torch:bucket_collectives", "torch:schedule_overlap_bucketing"

Defect = Callable[[fx.GraphModule], None]


def _calls(gm: fx.GraphModule, *names: str) -> Iterator[fx.Node]:
    return (
        node
        for node in gm.graph.nodes
        if node.op == "call_function" and any(name in str(node.target) for name in names)
    )


def _first(gm: fx.GraphModule, *names: str) -> fx.Node:
    return next(_calls(gm, *names))


def _behind(gm: fx.GraphModule, node: fx.Node, target: Any, *args: Any) -> fx.Node:
    with gm.graph.inserting_after(node):
        made = gm.graph.call_function(target, (node, *args))
    made.meta.update(node.meta)
    node.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)
    return made


def _groups(gm: fx.GraphModule) -> list[str]:
    return list(
        dict.fromkeys(str(node.args[-1]) for node in _calls(gm, "all_gather_into_tensor", "reduce_scatter_tensor"))
    )


# ----------------------------------------------------------------------------------------------------------- mistakes


def wrong_group(gm: fx.GraphModule) -> None:
    """The last collective goes over the other group of the mesh."""
    groups = _groups(gm)
    node = [one for one in _calls(gm, "all_gather_into_tensor", "reduce_scatter_tensor") if one.args[-1] == groups[0]][
        -1
    ]
    node.args = (*node.args[:-1], groups[-1])


def bucket_parts_swapped(gm: fx.GraphModule) -> None:
    """Two parts of a bucket of one size are read in each other's place."""
    for split in _calls(gm, "split_with_sizes"):
        parts = {user.args[1]: user for user in split.users}
        sizes = split.args[1]
        for i in range(len(sizes)):  # type: ignore[arg-type]
            for j in range(i + 1, len(sizes)):  # type: ignore[arg-type]
                if sizes[i] == sizes[j] and i in parts and j in parts:  # type: ignore[index]
                    parts[i].args, parts[j].args = (split, j), (split, i)
                    return
    raise LookupError("no bucket has two parts of one size")


def bucket_filled_in_another_order(gm: fx.GraphModule) -> None:
    """The first two parts of the same size are swapped in a bucket."""
    for cat in _calls(gm, "cat.default"):
        parts = list(cat.args[0])  # type: ignore[arg-type]
        shapes = [part.meta["val"].shape for part in parts]
        for i in range(len(parts) - 1):
            if shapes[i] == shapes[i + 1] and parts[i] is not parts[i + 1] and len(parts) > 2:
                parts[i], parts[i + 1] = parts[i + 1], parts[i]
                cat.args = (parts, *cat.args[1:])
                return
    raise LookupError("no bucket has two parts of one shape")


def read_before_the_wait(gm: fx.GraphModule) -> None:
    """What a collective writes is read before it is waited for."""
    wait = _first(gm, "wait_tensor")
    wait.replace_all_uses_with(wait.args[0])  # type: ignore[arg-type]
    gm.graph.output_node().prepend(wait)


def doubled_before_a_cast(gm: fx.GraphModule) -> None:
    """A value is doubled where it is cast."""
    cast = list(_calls(gm, "convert_element_type"))[-1]
    _behind(gm, cast, torch.ops.aten.mul.Tensor, 2)


def residual_twice(gm: fx.GraphModule) -> None:
    """A sum is added to its operand once more."""
    add = next(node for node in _calls(gm, "add.Tensor") if all(isinstance(one, fx.Node) for one in node.args[:2]))
    _behind(gm, add, torch.ops.aten.add.Tensor, add.args[0])


def average_for_sum(gm: fx.GraphModule) -> None:
    """A collective takes the mean instead of the sum."""
    node = _first(gm, "reduce_scatter_tensor", "all_reduce")
    node.args = tuple("avg" if one == "sum" else one for one in node.args)


def sum_once_more(gm: fx.GraphModule) -> None:
    """What is summed over a group already is summed again."""
    wait = next(node for node in _calls(gm, "wait_tensor") if node.meta["val"].is_floating_point())
    group = _groups(gm)[-1]
    total = _behind(gm, wait, functional.all_reduce.default, "sum", group)
    _behind(gm, total, functional.wait_tensor.default)


def rows_turned_round(gm: fx.GraphModule) -> None:
    """Values gathered from the members are in the opposite order."""
    wait = next(node for node in _calls(gm, "wait_tensor") if "all_gather" in str(node.args[0]))
    _behind(gm, wait, torch.ops.aten.flip.default, [0])


def scaled_on_one_side(gm: fx.GraphModule) -> None:
    """A gradient or an activation is scaled where it is exchanged, and not scaled back."""
    wait = [node for node in _calls(gm, "wait_tensor") if node.meta["val"].is_floating_point()][-1]
    _behind(gm, wait, torch.ops.aten.mul.Tensor, 0.125)


#: What is made wrong: the pass that goes before, and the mistake.
MISTAKES: tuple[tuple[str, Defect], ...] = (
    (BUCKETS, wrong_group),
    (BUCKETS, bucket_parts_swapped),
    (BUCKETS, bucket_filled_in_another_order),
    (BUCKETS, average_for_sum),
    (BUCKETS, scaled_on_one_side),
    (SCHEDULE, read_before_the_wait),
    (SCHEDULE, doubled_before_a_cast),
    (SCHEDULE, residual_twice),
    (SCHEDULE, sum_once_more),
    (SCHEDULE, rows_turned_round),
)


def check(graph: Path, target: str, mesh: str, folder: Path) -> dict[str, Any]:
    """Run `tcverify check` on a graph; returns its output."""
    dp, tp = mesh.split("x")
    options = {
        "mesh": f"dp={dp},tp={tp}", "pass": target, "confirm": "none", "draws": 1,
        "checks": "equivalence,collectives,interleavings", "report-dir": folder, "shrink-time": 200, "pass-timeout": 600,
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "tcverify",
        "check",
        str(graph),
        *(f"--{name}={value}" for name, value in options.items()),
    ]
    command += [f"--group={name}={dim}" for name, dim in groups_of(graph).items()]
    start = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    found = [json.loads(path.read_text()) for path in folder.glob("*/counterexample.json")]
    words = ("passed", "refuted", "inconclusive", "nothing tested")
    lines = [line.strip() for line in run.stdout.splitlines() if line.strip().startswith(words)]
    return {
        "says": lines[0] if lines else (run.stderr.strip().splitlines() or ["nothing"])[-1],
        "why": next(
            (line.strip() for line in run.stdout.splitlines() if line.strip().startswith("inconclusive, ")), ""
        ),
        "kinds": sorted({case["finding"]["kind"] for case in found}),
        "nodes": [
            sum(1 for node in case["program"]["graphs"][0]["nodes"] if node["op"].startswith("call")) for case in found
        ],
        "seconds": time.perf_counter() - start,
    }


@click.command()
@click.option("--mesh", default="8x8")
@click.option("--layers", default=2)
@click.option("--family", default="llama-fsdp-tp")
@click.option("--kind", default="forward", type=click.Choice(["forward", "backward"]))
@click.option("--only")
def main(mesh: str, layers: int, family: str, kind: str, only: str | None) -> None:
    """Print one row per mistake, and one per pass without any."""
    dp, tp = mesh.split("x")
    table = Table("pass", "mistake", "tcverify check says", "finding", "nodes", "seconds")
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            str(Path(__file__).with_name("production_models.py")),
            family,
            folder,
            "--dp",
            dp,
            "--tp",
            tp,
        ]
        subprocess.run([*command, "--layers", str(layers)], check=True, capture_output=True)
        (graph,) = Path(folder).glob(f"*_{kind}.txt")
        chosen = [(base, one) for base, one in MISTAKES if only in (None, one.__name__)]
        for number, (base, mistake) in enumerate(
            [*((base, None) for base in dict.fromkeys(b for b, _ in chosen)), *chosen]
        ):
            target = base if mistake is None else f"{base}+{Path(__file__).resolve()}:{mistake.__name__}"
            row = check(graph, target, mesh, Path(folder) / f"reports{number}")
            name = mistake.__name__ if mistake is not None else "none"
            said = f"{row['says']} {row['why']}".strip()
            table.add_row(
                base, name, said, " ".join(row["kinds"]), " ".join(map(str, row["nodes"])), f"{row['seconds']:.0f}"
            )
    Console(width=180).print(table)


if __name__ == "__main__":
    main()
