"""A dim sharded over two mesh dims is unflattened. The second mesh dim belongs to the second of the new dims; DTensor forgets it.

Exit code 1: it fails. `linear` is what nn.Linear does with a sequence that context and sequence parallelism both shard; its outcome is shown,
and does not count, since releases before 2.13 refuse to flatten such a dim at all.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

RANKS = 4


def linear(x: DTensor) -> DTensor:
    """Flatten batch and sequence, and take them apart again."""
    return x.view(16, 3).view(2, 8, 3)


def attempt(make) -> list[float] | str:
    try:
        return make().full_tensor().flatten().tolist()
    except RuntimeError as error:
        return f"RuntimeError: {str(error).splitlines()[0]}"


def main(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    rows, hidden = torch.arange(24.0).view(8, 3), torch.arange(48.0).view(2, 8, 3)
    rows_here, hidden_here = rows.chunk(RANKS)[rank], hidden.chunk(RANKS, 1)[rank]  # rank 2·cp + tp has this part
    right = True
    for name, local, whole, shards, call in (
        ("view", rows_here, rows, (Shard(0), Shard(0)), lambda x: x.view(2, 4, 3)),
        ("linear", hidden_here, hidden, (Shard(1), Shard(1)), linear),
    ):
        placed = DTensor.from_local(local.contiguous(), mesh, shards, run_check=False)
        expected, got = whole.flatten().tolist(), attempt(lambda: call(placed))
        right &= got == expected or name == "linear"
        if rank == 0:
            print(f"{name}: expected {expected[:4]} …, got {got if isinstance(got, str) else got[:4]}", flush=True)
    torch.save(right, f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
