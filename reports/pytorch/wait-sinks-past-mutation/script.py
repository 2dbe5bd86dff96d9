"""A value is read behind a wait and overwritten later; with the wait, the read moves behind the overwriting."""

import sys
import warnings

import torch
import torch._inductor.config as config
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from torch._inductor import comms


def step(a: torch.Tensor, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    y = fc.all_reduce(a, "sum", dist.group.WORLD) + x
    x.copy_(z.exp())
    return y


def run() -> tuple[list[float], list[float]]:
    def arguments() -> list[torch.Tensor]:
        return [torch.full((4,), 1.0), torch.full((4,), 10.0), torch.zeros(4)]

    settings = {
        "reorder_for_compute_comm_overlap": True,
        "reorder_for_compute_comm_overlap_passes": ["sink_waits_iterative"],
        "fx_graph_cache": False,
    }
    with config.patch(settings):
        return step(*arguments()).tolist(), torch.compile(step)(*arguments()).tolist()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not hasattr(comms, "sink_waits_iterative"):
        sys.exit(2)
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    expected, got = run()
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(expected != got))
