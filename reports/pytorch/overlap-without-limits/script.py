"""Overlap scheduling is told that memory has no limit, as its docstring allows, and raises. One process, no GPU."""

import sys
import warnings
from unittest import mock

import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _runtime_estimation

LIMITS = ("max_memory_increase_gb", "max_memory_increase_ratio")
OP = torch.ops._c10d_functional


def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    group = dist.group.WORLD.group_name
    return x @ OP.wait_tensor(OP.all_gather_into_tensor(weight, 2, group))


def run(limits: dict[str, float | None]) -> str | None:
    """What the scheduler raises. The memory bandwidth of the GPU, which it asks for, is given."""
    from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing

    graph = make_fx(step, tracing_mode="fake")(torch.ones(4, 4), torch.ones(2, 4))
    try:
        with mock.patch.object(_runtime_estimation, "get_gpu_dram_gbps", lambda *_: 1555.0):
            schedule_overlap_bucketing(graph, custom_runtime_estimation=lambda *_: 1e-3, **limits)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    try:
        from torch._inductor.fx_passes.overlap_scheduling import schedule_overlap_bucketing as found
    except ImportError:
        sys.exit(2)
    if not set(LIMITS) <= set(found.__annotations__):
        sys.exit(2)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    raised = {said: run(dict.fromkeys(LIMITS, said)) for said in (1.0, None)}
    dist.destroy_process_group()
    assert raised[1.0] is None, raised
    print(f"torch {torch.__version__}: expected no error without limits, got {raised[None]}")
    sys.exit(int(raised[None] is not None and "schedule_node" in raised[None]))
