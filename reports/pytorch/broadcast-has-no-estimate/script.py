"""A broadcast is compiled with an overlap pass. Run times are estimated for GPUs alone: without one, nodes of the CPU say they are on one."""

import sys
import warnings
from typing import Any
from unittest import mock

import torch
import torch._inductor.config as config
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._inductor import comms, scheduler
from torch.testing._internal.distributed.fake_pg import FakeStore

PASS = "sink_waits_iterative"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ESTIMATE = "_get_estimated_runtime"


def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return fc.broadcast(x, 0, dist.group.WORLD) + 1, y @ y


def run() -> str | None:
    node: Any = scheduler.BaseSchedulerNode
    estimate = getattr(node, ESTIMATE)

    def as_on_gpu(self: Any) -> float:
        with mock.patch.object(scheduler, "is_gpu", lambda _: True):
            return estimate(self)

    settings = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": [PASS],
        "fx_graph_cache": False,
        "compile_threads": 1,
    }
    x = torch.ones(4, 4, device=DEVICE)
    try:
        with config.patch(settings), mock.patch.object(node, ESTIMATE, estimate if DEVICE == "cuda" else as_on_gpu):
            torch.compile(step)(x, x)
    except Exception as error:
        return next((line for line in str(error).splitlines() if "Error" in line), str(error))
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not hasattr(comms, PASS) or not hasattr(scheduler.BaseSchedulerNode, ESTIMATE):
        sys.exit(2)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    raised = run()
    dist.destroy_process_group()
    print(f"torch {torch.__version__}, {DEVICE}: expected no error, got {raised}")
    sys.exit(int(raised is not None and "nsteps" in raised))
