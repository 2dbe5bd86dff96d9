"""Two ranks train four stages, of which the first is frozen. A zero-bubble schedule gives the second stage no gradient."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

STAGES = 4


def layers():
    torch.manual_seed(0)
    made = [nn.Linear(2, 2) for _ in range(STAGES)]
    made[0].requires_grad_(False)
    return made


def loss_of(output, target):
    return ((output - target) ** 2).mean()


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x, target = torch.arange(8.0).reshape(4, 2), torch.zeros(4, 2)
    own = {number: one for number, one in enumerate(layers()) if number % 2 == rank}
    stages = [PipelineStage(one, number, STAGES, torch.device("cpu")) for number, one in own.items()]
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=loss_of)
    schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
    if rank == 1:
        whole = layers()
        loss_of(nn.Sequential(*whole)(x), target).backward()
        found.put((whole[1].weight.grad.tolist(), None if own[1].weight.grad is None else own[1].weight.grad.tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found)) for rank in range(2)]
        for one in ranks:
            one.start()
        expected, got = found.get(timeout=100)
        for one in ranks:
            one.join()
    print(f"torch {torch.__version__}: expected the gradient of stage 1 to be {expected}, got {got}")
    sys.exit(got is None or not torch.allclose(torch.tensor(got), torch.tensor(expected)))
