"""Two inputs change places by way of a clone; the clone is dropped, and one of them is lost."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc


def swap(x: torch.Tensor, y: torch.Tensor) -> None:
    kept = x.clone()
    x.copy_(y)
    y.copy_(kept)


def run() -> tuple[list[list[float]], list[list[float]]]:
    pairs = [[torch.full((2,), 2.0), torch.full((2,), 7.0)] for _ in range(2)]
    swap(*pairs[0])
    torch.compile(swap)(*pairs[1])
    eager, compiled = ([one.tolist() for one in pair] for pair in pairs)
    return eager, compiled


if __name__ == "__main__":
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    expected, got = run()
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(expected != got))
