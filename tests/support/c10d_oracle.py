"""What torch's own kernels compute on real gloo groups: run as a script, it writes the outputs of every rank as JSON.

Groups are in the order of ranks, as torch makes them.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives
import torch.distributed.tensor

WORLD = 3

#: Collectives that copy their operand before they return, with their arguments.
COPIES = (("all_reduce", "sum"), ("all_reduce_coalesced", "sum"), ("broadcast", 0))


def operand(rank: int) -> torch.Tensor:
    """What a rank contributes: [6, 3], other numbers on every rank."""
    return torch.arange(18, dtype=torch.float64).reshape(6, 3) + 100 * rank


def sizes(rank: int) -> tuple[list[int], list[int]]:
    """(received, sent) rows of an all_to_all of which every pair of ranks exchanges another number."""
    sent = [[1, 2, 3], [0, 4, 2], [3, 3, 0]]
    return [row[rank] for row in sent], sent[rank]


def _cases(group: str, rank: int) -> dict[str, Callable[[], Any]]:
    c10d, autograd = torch.ops._c10d_functional, torch.ops._c10d_functional_autograd
    x = operand(rank)
    there, back = (rank + 1) % WORLD, (rank - 1) % WORLD

    def batch() -> list[torch.Tensor]:
        made = c10d.batch_p2p_ops(["isend", "irecv"], [there, back], [0, 0], [x, torch.zeros_like(x)], group)
        return [c10d.wait_tensor(y) for y in made]

    def tagged() -> list[torch.Tensor]:
        if rank == 0:
            return [c10d.wait_tensor(y) for y in (c10d.isend(x, 1, 7, group), c10d.isend(-x, 1, 8, group))]
        if rank == 1:
            buffers = [torch.zeros_like(x) for _ in range(2)]
            started = [c10d.irecv(buffers[0], 0, 8, group), c10d.irecv(buffers[1], 0, 7, group)]
            return [c10d.wait_tensor(y) for y in started]
        return []

    def written_behind(op: str, *more: Any) -> Callable[[], Any]:
        """Write into an operand behind a start for which the other ranks are late."""

        def call() -> Any:
            own = x.clone()
            dist.barrier()
            time.sleep(0.2 * (rank > 0))
            started = getattr(c10d, op)([own] if op.endswith("_coalesced") else own, *more, group)
            own.fill_(-1.0)
            return c10d.wait_tensor(started[0] if op.endswith("_coalesced") else started)

        return call

    return {
        **{f"written_behind_{op}": written_behind(op, *more) for op, *more in COPIES},
        "all_to_all": lambda: c10d.wait_tensor(autograd.all_to_all_single(x, *sizes(rank), group)),
        "all_gather": lambda: c10d.wait_tensor(autograd.all_gather_into_tensor(x, WORLD, group)),
        "reduce_scatter": lambda: c10d.wait_tensor(autograd.reduce_scatter_tensor(x, "avg", WORLD, group)),
        "reshard": lambda: torch.ops._dtensor.shard_dim_alltoall(x, 0, 1, group),
        "reshard_back": lambda: torch.ops._dtensor.shard_dim_alltoall(x, 1, 0, group),
        "reshard_one": lambda: torch.ops._dtensor.shard_dim_alltoall(x, 0, 0, group),
        "wrapped": lambda: c10d._wrap_tensor_autograd(x).trigger_wait(),
        "never_started": lambda: c10d.wait_tensor(x),
        "batch": batch,
        "tagged": tagged,
        "integer_average": lambda: c10d.wait_tensor(
            c10d.all_reduce(x.long(), "avg", group)
        ),  # the last: gloo raises once more whatever comes behind it
    }


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, list) else value.tolist()


def _serve(rank: int, directory: str, results: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", rank=rank, world_size=WORLD, init_method=f"file://{directory}/rendezvous")
    found = {}
    for name, call in _cases(dist.group.WORLD.group_name, rank).items():  # type: ignore[union-attr]
        try:
            found[name] = _plain(call())
        except RuntimeError as error:
            found[name] = {"missing" if "supported" in str(error) else "error": str(error)}
        except AttributeError as error:  # an op that this torch does not have yet
            found[name] = {"missing": str(error)}
    results.put((rank, found))


if __name__ == "__main__":
    context = mp.get_context("fork")
    queue = context.Queue()
    with tempfile.TemporaryDirectory() as directory:
        processes = [context.Process(target=_serve, args=(rank, directory, queue)) for rank in range(WORLD)]
        for process in processes:
            process.start()
        answers = dict(queue.get(timeout=100) for _ in processes)
        for process in processes:
            process.join(20)
    # A file: gloo of some versions writes to stdout itself.
    Path(sys.argv[1]).write_text(json.dumps([answers[rank] for rank in range(WORLD)]), encoding="utf-8")
