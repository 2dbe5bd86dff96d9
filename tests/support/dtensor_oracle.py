"""Runs transitions between layouts with torch's DTensor, on real gloo processes.

    python -m tests.support.dtensor_oracle JOBS RESULTS

is one run: it forks the ranks, after the imports, and writes what each rank holds in the end. The collectives that DTensor calls
are counted where torch dispatches them: torch's own counter needs NumPy.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from tcverify.program import Placed, PlacedBuilder, Program, Recipe
from tests import warm
from tests.support.naive_layouts import spread, whole_input

ROOT = Path(__file__).parents[2]
WORLD = 4
SHAPE = (12, 12)


@dataclass(frozen=True)
class Transition:
    """A tensor [12, 12] goes from placements to placements.

    Attributes:
        mesh: nested ranks, as text.
        source: per mesh dim "R" (replicated), "S0", "S1" (sharded) or "P" (to be summed over that mesh dim; one at most).
        target: the same, without "P".
        onto: the mesh of the result, where it is another one.
        rows: of the tensor.
    """

    mesh: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    onto: str | None = None
    rows: int = 12

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the operand, with the dim of the addends in front if there is one."""
        sizes = torch.tensor(json.loads(self.mesh)).shape
        addends = [size for size, placement in zip(sizes, self.source, strict=True) if placement == "P"]
        return (*addends, self.rows, SHAPE[1])

    @property
    def source_layout(self) -> str:
        """As text: addends are parts of the first dim."""
        shift = "P" in self.source
        return f"{self.mesh} {', '.join(_text(p, shift) for p in self.source)}"

    @property
    def target_layout(self) -> str:
        return f"{self.onto or self.mesh} {', '.join(_text(p, False) for p in self.target)}"

    def program(self) -> Program:
        """The same in the project's dialect: one `set` or `reduce`. Values are integers, so that sums are exact.

        Raises:
            ProgramError: a tensor cannot lie so.
        """
        b = PlacedBuilder(WORLD)
        x = b.input("x", self.shape, self.source_layout, recipe=Recipe("integers", 100.0))
        made: Placed = b.reduce(x, 0, self.target_layout) if "P" in self.source else b.set(x, self.target_layout)
        return b.build(made)

    def __str__(self) -> str:
        return f"{', '.join(self.source)} → {', '.join(self.target)}"


def _text(placement: str, shift: bool) -> str:
    if placement == "R":
        return "replicated"
    return "shard(0)" if placement == "P" else f"shard({int(placement[1:]) + shift})"


@dataclass
class Outcome:
    """What DTensor made of a transition.

    Attributes:
        collectives: by name, on the first rank of the mesh.
        error: what it raised, in place of results.
        results: by rank.
    """

    collectives: dict[str, int] = field(default_factory=dict)
    error: str | None = None
    results: dict[int, torch.Tensor] = field(default_factory=dict)


def run_dtensor(transitions: list[Transition]) -> list[Outcome]:
    """Run all of these with DTensor, in one group of four gloo processes."""
    with tempfile.TemporaryDirectory() as directory:
        jobs = Path(directory, "jobs.json")
        jobs.write_text(json.dumps([asdict(t) for t in transitions]))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        code, _, errors = warm.run(
            "-m", "tests.support.dtensor_oracle", str(jobs), directory, cwd=ROOT, env=environment
        )
        if code:
            raise RuntimeError(f"DTensor's ranks failed: {errors[-2000:]}")
        by_rank = [torch.load(Path(directory, f"{rank}.pt")) for rank in range(WORLD)]
    outcomes = []
    for i in range(len(transitions)):
        outcome = Outcome()
        for rank, made in enumerate(by_rank):
            if i not in made:
                continue
            result, collectives, error = made[i]
            if not outcome.results and outcome.error is None:
                outcome.collectives, outcome.error = collectives, error
            if result is not None:
                outcome.results[rank] = result
        outcomes.append(outcome)
    return outcomes


# ------------------------------------------------------------------------------------------------- in the ranks' processes


def _rank(rank: int, directory: str, transitions: list[Transition]) -> None:
    import torch.distributed as dist
    from torch.distributed.tensor import DeviceMesh

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(os.path.join(directory, "store"), WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    texts = dict.fromkeys(mesh for t in transitions for mesh in (t.mesh, t.onto) if mesh is not None)
    meshes = {text: DeviceMesh("cpu", torch.tensor(json.loads(text))) for text in texts}  # by all ranks, inside or not
    made = {i: _redistribute(rank, t, meshes) for i, t in enumerate(transitions) if rank in _ranks(t.mesh)}
    torch.save(made, os.path.join(directory, f"{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()


def _ranks(mesh: str) -> list[int]:
    return [int(rank) for rank in torch.tensor(json.loads(mesh)).flatten()]


def _redistribute(
    rank: int, t: Transition, meshes: dict[str, Any]
) -> tuple[torch.Tensor | None, dict[str, int], str | None]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    def placement(text: str) -> Any:
        return Replicate() if text == "R" else Partial() if text == "P" else Shard(int(text[1:]))

    local = _local(t, rank)
    source, target = [placement(p) for p in t.source], [placement(p) for p in t.target]
    whole = torch.Size((t.rows, SHAPE[1]))
    given = DTensor.from_local(local, meshes[t.mesh], source, run_check=False, shape=whole, stride=(SHAPE[1], 1))
    counted = _counting()
    try:
        with counted:
            made = given.redistribute(meshes[t.onto or t.mesh], target).to_local()
    except Exception as error:  # noqa: BLE001 - what DTensor refuses is what is asked here
        return None, {}, f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return made, dict(counted.found), None


def _local(t: Transition, rank: int) -> torch.Tensor:
    """What a rank starts with: whatever divides unevenly goes as `torch.chunk` cuts it."""
    if t.rows % len(_ranks(t.mesh)):
        whole = torch.arange(float(t.rows * SHAPE[1])).reshape(t.rows, SHAPE[1])
        return whole.chunk(len(_ranks(t.mesh)))[_ranks(t.mesh).index(rank)] if t.source == ("S0",) else whole
    b = PlacedBuilder(WORLD)
    x = b.input("x", t.shape, "[0] replicated", recipe=Recipe("integers", 100.0))
    local = spread(whole_input(b.build(x)), t.source_layout)[rank]
    return local[0] if "P" in t.source else local


def _counting() -> Any:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        """Counts the collectives that torch dispatches."""

        def __init__(self) -> None:
            super().__init__()
            self.found: Counter[str] = Counter()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._opname
            if "c10d" in func.namespace and not name.startswith(("wait", "_wrap")):
                self.found[name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")] += 1
            return func(*args, **(kwargs or {}))

    return Counting()


def _main(jobs: str, directory: str) -> None:
    import multiprocessing

    import torch.distributed.tensor  # noqa: F401 - once, for all ranks

    transitions = [
        Transition(**{key: tuple(v) if isinstance(v, list) else v for key, v in job.items()})
        for job in json.loads(Path(jobs).read_text())
    ]
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_rank, args=(rank, directory, transitions)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    _main(*sys.argv[1:])
