"""The wait of a collective passes a matmul that was the last to read what the wait's own group reads too."""

import sys
import warnings

import torch
import torch._inductor.config as config
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._inductor import comms


def step(a: torch.Tensor, x: torch.Tensor, large: torch.Tensor) -> tuple[torch.Tensor, ...]:
    peak = (large @ large).sum()  # of memory, so that the pass is free to move the rest
    b = x @ x
    reduced = fc.all_reduce(a, "sum", dist.group.WORLD)
    return peak, reduced + b, b @ x


def run() -> str | None:
    settings = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits_iterative"],
        "fx_graph_cache": False,
    }
    try:
        with config.patch(settings):
            torch.compile(step)(torch.ones(4, 4), torch.ones(4, 4), torch.ones(32, 32))
    except Exception as error:
        return next((line for line in str(error).splitlines() if "Error" in line), str(error))
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not hasattr(comms, "sink_waits_iterative"):
        sys.exit(2)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    raised = run()
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: {raised}")
    sys.exit(int(raised is not None and "KeyError" in raised))
