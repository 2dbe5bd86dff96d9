"""Rank 0 broadcasts two tensors; rank 1 brings a buffer of zeros for each. Compiled for training, rank 1 receives only one."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp


def step(weight, rank):
    if rank == 0:
        first, second = torch.full_like(weight, 1.0), torch.full_like(weight, 2.0)
    else:
        first, second = torch.zeros_like(weight), torch.zeros_like(weight)
    first = funcol.broadcast(first.detach(), 0, dist.group.WORLD)
    second = funcol.broadcast(second.detach(), 0, dist.group.WORLD)
    return weight * first, weight * second


def joined(rank, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return torch.ones(4, requires_grad=True)


def peer(store):
    try:
        step(joined(0, store), 0)[1].sum().item()
    except RuntimeError:  # rank 1 has left
        pass


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        other = mp.get_context("spawn").Process(target=peer, args=(f"{folder}/store",))
        other.start()
        weight = joined(1, f"{folder}/store")
        # The default backend uses the same partitioner, and its CSE, as aot_eager; this one needs no C++ compiler.
        compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
        got = [float(one[0].detach()) for one in compiled(weight, 1)]
        print(f"torch {torch.__version__}: expected [1.0, 2.0] on rank 1, got {got}", flush=True)
        other.kill()
        other.join()
    os._exit(0 if got == [1.0, 2.0] else 1)  # without the end of a process group whose peer has gone
