"""A product with one part of a split, compiled with allow_comms_decompositions. Exit code 1: the compiler raises."""

import sys

import torch
import torch.distributed as dist
from torch._inductor import config

SETTING = "aten_distributed_optimizations.allow_comms_decompositions"


def step(x: torch.Tensor, qkv: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ qkv).split(2, dim=1)
    return torch.softmax(q @ k.t(), 1) @ v


if __name__ == "__main__":
    if SETTING not in config.get_config_copy():
        print("this torch has no decomp_comms")
        sys.exit(2)
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    given = torch.ones(3, 4), torch.ones(4, 6)
    expected, good = step(*given).tolist(), False
    try:
        with config.patch({SETTING: True, "fx_graph_cache": False, "compile_threads": 1}):
            got = torch.compile(step, fullgraph=True, dynamic=False)(*given).tolist()
        good = got == expected
    except Exception as error:
        if "object has no attribute 'dim'" not in str(error):
            raise
        got = " ".join(str(error).split())[:120]
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(not good))
