"""A bfloat16 and a float32 tensor are gathered in one bucket. The bfloat16 tensor has an odd number of elements."""

import logging
import os
import sys

import torch
import torch.distributed as dist
from torch._inductor import config

c10d = torch.ops._c10d_functional


def step(half: torch.Tensor, full: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    first, second = (c10d.all_gather_into_tensor(one, 1, group) for one in (half, full))
    return c10d.wait_tensor(first), c10d.wait_tensor(second)


if __name__ == "__main__":
    logging.disable()  # the compiler logs what it raises
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if not hasattr(config, "bucket_all_gathers_fx") or not hasattr(config, "bucket_all_gathers_bucket_mode"):
        sys.exit(2)
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    group = dist.group.WORLD.group_name
    settings = {
        "bucket_all_gathers_fx": "all",
        "bucket_all_gathers_bucket_mode": "custom_ops_multidtype",
        "fx_graph_cache": False,
    }
    bad = False
    for count in (2, 3):
        args = torch.ones(count, dtype=torch.bfloat16), torch.full((1,), 2.0), group
        expected = [one.tolist() for one in step(*args)]
        torch._dynamo.reset()
        try:
            with config.patch(settings):
                got = str([one.tolist() for one in torch.compile(step, fullgraph=True)(*args)])
        except Exception as error:  # Inductor wraps what a pass raises
            if "must be divisible by" not in str(error):
                raise
            got, bad = " ".join(str(error).split())[:110], True
        print(f"torch {torch.__version__}, {count} elements: expected {expected}, got {got}", flush=True)
    dist.destroy_process_group()
    os._exit(int(bad))  # processes of the compiler can hold up the end
