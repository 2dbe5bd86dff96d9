"""pixel_shuffle of a DTensor that is sharded by channels: each rank is to shuffle its own channels, of which it has too few."""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

RANKS = 2


def main(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    whole = torch.arange(8.0).view(4, 1, 2)
    expected = F.pixel_shuffle(whole, 2).flatten().tolist()
    placed = distribute_tensor(whole, init_device_mesh("cpu", (RANKS,)), [Shard(0)])
    try:
        got: list[float] | str = F.pixel_shuffle(placed, 2).full_tensor().flatten().tolist()
    except NotImplementedError:
        got = "no strategy"
    except RuntimeError as error:
        got = f"RuntimeError: {str(error).splitlines()[0]}"
    if rank == 0:
        print(f"expected {expected}, got {got}", flush=True)
    torch.save(2 if got == "no strategy" else int(got != expected), f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(max(torch.load(f"{folder}/{rank}") for rank in range(RANKS)))
