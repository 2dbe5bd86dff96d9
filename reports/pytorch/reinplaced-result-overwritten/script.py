"""A sum is reduced into an input, which another copy then overwrites before the sum is returned."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc


def step(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    total = fc.all_reduce(x, "sum", dist.group.WORLD)
    x.copy_(z)
    return total


def run() -> tuple[list[float], list[float]]:
    eager = step(torch.full((4,), 2.0), torch.full((4,), 7.0))
    compiled = torch.compile(step)(torch.full((4,), 2.0), torch.full((4,), 7.0))
    return eager.tolist(), compiled.tolist()


if __name__ == "__main__":
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    expected, got = run()
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(expected != got))
