"""Gradients of two dtypes are reduced as one tensor: the smaller dtype comes back as the larger one."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc


def step(first: torch.Tensor, second: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    group = dist.group.WORLD
    return fc.all_reduce(first / 2, "sum", group), fc.all_reduce(second / 2, "sum", group)


def run() -> tuple[list[str], list[str]]:
    options = {"_fuse_ddp_communication": True, "_fuse_ddp_bucket_size": 25}  # as DDP sets them for "python_reducer"
    args = torch.full((2,), 2.0, dtype=torch.bfloat16), torch.full((2,), 6.0)
    eager, compiled = step(*args), torch.compile(step, options=options)(*args)
    return [str(one.dtype) for one in eager], [str(one.dtype) for one in compiled]


if __name__ == "__main__":
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    expected, got = run()
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: expected {expected}, got {got}", flush=True)
    os._exit(int(expected != got))  # processes of the compiler can hold up the end
