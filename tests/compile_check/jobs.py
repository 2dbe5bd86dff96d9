"""Jobs of two gloo ranks that compile with checked passes. Each prints one line of JSON per rank: what came of it."""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tcverify import REPLICATED, Refuted, checked, checked_backend
from tests.support import checked_passes as passes


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(Mlp(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def summary(pass_: Any) -> dict[str, Any]:
    report = pass_.report()
    return {
        "status": report.status, "calls": report.calls, "changed": report.changed, "cached": report.cached,
        "doubts": dict(report.doubts), "details": report.details, "cases": report.cases,
    }  # fmt: skip


class EndOfTest(Exception):
    """Ends a compile before Inductor makes code, which takes a minute."""


class Then(passes.Graphwise):
    """A checked pass in Inductor's hook, and the end."""

    def __init__(self, first: Any) -> None:
        self.first = first

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.first(graph)
        raise EndOfTest


def inductor(rank: int) -> dict[str, Any]:
    """Inductor's own hooks, up to where it makes code: a sound pass and one with a defect."""
    from torch._inductor import config

    found: dict[str, Any] = {}
    for name, hook in (("sound", "post_grad_custom_post_pass"), ("wrong", "post_grad_custom_pre_pass")):
        torch._dynamo.reset()
        pass_ = checked(passes.Graphwise() if name == "sound" else passes.GraphwiseWrong())
        try:
            with config.patch(**{hook: Then(pass_)}, force_disable_caches=True), torch.no_grad():
                torch.compile(model(), dynamic=name == "sound")(torch.ones(4, 8))
        except (torch._inductor.exc.InductorError, torch._dynamo.exc.BackendCompilerFailed) as error:  # torch 2.9
            found[name] = {**summary(pass_), "raised": str(error)}
    return found


def generated(rank: int) -> dict[str, Any]:
    """Inductor's hook, and the code that it makes, forward and backward."""
    from torch._inductor import config

    x, parallel = torch.ones(4, 8), model()
    pass_ = checked(passes.Graphwise())
    with config.patch(post_grad_custom_post_pass=pass_, force_disable_caches=True):
        actual = torch.compile(parallel)(x)
        actual.sum().backward()
    return {**summary(pass_), "equal": torch.allclose(actual, parallel(x), atol=1e-5)}


def fewer(rank: int) -> dict[str, Any]:
    """Rank 0 compiles a graph that rank 1 does not, while both go on with the first."""
    pass_ = checked(passes.scatter_and_gather, timeout=2.0)
    backend = checked_backend(pass_)
    parallel = model()
    with torch.no_grad():
        torch.compile(parallel, backend=backend)(torch.ones(4, 8))
        first = summary(pass_)
        if rank == 0:
            pass_(_graph())
        dist.barrier()
    return {"first": first, "last": summary(pass_)}


def different(rank: int) -> dict[str, Any]:
    """The pass changes the graph on one rank only, so that the ranks no longer meet."""

    def one_sided(gm: torch.fx.GraphModule) -> None:
        if dist.get_rank() == 1:
            passes.scatter_and_gather(gm)

    pass_ = checked(one_sided, minimise=0, report_dir=None)
    try:
        pass_(_graph())
    except Refuted as error:
        return {"kind": error.kind, "headline": error.headline}
    return summary(pass_)


def one_raises(rank: int) -> dict[str, Any]:
    """The pass raises on rank 1: there its own error comes through, elsewhere it is a finding."""

    def half_broken(gm: torch.fx.GraphModule) -> None:
        if dist.get_rank() == 1:
            raise LookupError("no such pattern")

    pass_ = checked(half_broken)
    try:
        pass_(_graph())
    except (Refuted, LookupError) as error:
        return {"error": type(error).__name__, "text": str(error)}
    return summary(pass_)


def cached(rank: int) -> dict[str, Any]:
    pass_ = checked(passes.rows_by_process_group, placements={"*": {"tp": REPLICATED}})
    for _ in range(3):
        pass_(_graph())
    return summary(pass_)


def storeless(rank: int) -> dict[str, Any]:
    """The store of the process group fails."""

    def broken() -> Any:
        raise RuntimeError("the store is gone")

    dist.distributed_c10d._get_default_store = broken
    pass_ = checked(passes.scatter_and_gather)
    pass_(_graph())
    return summary(pass_)


def _graph() -> torch.fx.GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    group = dist.group.WORLD.group_name  # type: ignore[union-attr]

    def function(x: torch.Tensor) -> torch.Tensor:
        return passes.C10D.wait_tensor(passes.C10D.all_reduce(torch.relu(x), "sum", group)) + 1

    return make_fx(function, tracing_mode="fake")(torch.ones(4, 6))


JOBS: dict[str, Callable[[int], dict[str, Any]]] = {
    job.__name__: job for job in (inductor, generated, fewer, different, one_raises, cached, storeless)
}


def _rank(rank: int, port: int, names: list[str], outputs: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    dist.init_process_group("gloo")
    found = {}
    for name in names:
        torch._dynamo.reset()
        found[name] = JOBS[name](rank)
        dist.barrier()
    outputs.put((rank, json.dumps(found)))
    dist.destroy_process_group()


def main(names: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = mp.get_context("spawn")
    outputs = context.Queue()
    processes = [context.Process(target=_rank, args=(rank, port, names, outputs)) for rank in range(2)]
    for process in processes:
        process.start()
    found: dict[int, str] = {}
    while len(found) < 2 and (any(p.is_alive() for p in processes) or not outputs.empty()):
        try:
            rank, text = outputs.get(timeout=0.5)
        except Exception:  # noqa: BLE001 - nothing there yet
            continue
        found[rank] = text
    for process in processes:
        process.join(10)
        process.kill()
    print(json.dumps([json.loads(found[rank]) for rank in range(2)]))


if __name__ == "__main__":
    main(sys.argv[1:])
