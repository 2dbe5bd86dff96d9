"""Two ranks compile the same step. Rank 0 has compiled another use of its custom op before: it computes other values than its peer."""

import os
import sys
import tempfile

import torch
import torch._inductor.config as config
import torch.distributed as dist
import torch.multiprocessing as mp

Tensor = torch.Tensor


@torch.library.custom_op("demo::identity", mutates_args=())
def identity(x: Tensor) -> Tensor:
    return x.clone()


@identity.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.sin(x) * y
    return (hidden + 1).sum(-1), identity(hidden)


def main(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(64, 64, generator=generator).bfloat16() for _ in range(2))
    config.fx_graph_cache = False  # a cache decides by chance: whose code it has is taken by both
    if rank == 0:
        torch.compile(lambda value: identity(value + 1))(x)  # what one rank does alone: an evaluation, a log
    own = torch.compile(step)(x, y)[0]
    both = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(both, own)
    differ = int((both[0] != both[1]).sum())
    print(f"rank {rank}: expected the values of the other rank, got {differ} of {own.numel()} that differ", flush=True)
    dist.barrier()
    os._exit(int(differ > 0))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(main, args=(f"{folder}/store",), nprocs=2, start_method="spawn", join=False)
        for process in ranks.processes:
            process.join()
        sys.exit(max(process.exitcode for process in ranks.processes))
