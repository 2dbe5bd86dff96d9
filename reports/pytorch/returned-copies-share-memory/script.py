"""A function returns two copies of one value. Compiled, it returns the same memory twice: a write into one is in both."""

import sys

import torch
import torch.distributed as dist


def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x + 1
    return hidden.clone(), hidden.clone()


def second(first: torch.Tensor, other: torch.Tensor) -> list[float]:
    """What the second result holds after a write into the first."""
    first.zero_()
    return other.tolist()


if __name__ == "__main__":
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    expected, got = second(*step(torch.ones(2))), second(*torch.compile(step)(torch.ones(2)))
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(expected != got))
