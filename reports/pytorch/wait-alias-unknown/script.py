"""A wait hands on the storage it waits for; compiled code takes it for a new one, and writes into the input."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc


def replaced(x: torch.Tensor) -> torch.Tensor:
    return torch.index_put(fc.wait_tensor(x), (torch.tensor([0]),), torch.tensor([5.0]))


def run() -> tuple[list[float], list[float]]:
    eager, compiled = torch.full((4,), 2.0), torch.full((4,), 2.0)
    replaced(eager)
    torch.compile(replaced)(compiled)
    return eager.tolist(), compiled.tolist()


if __name__ == "__main__":
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    expected, got = run()
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(expected != got))
