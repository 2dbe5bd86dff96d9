"""Two ranks train four stages under ZBV. With defer_pp_recv they take activations of one microbatch for those of another."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

RANKS, STAGES, MICROBATCHES = 2, 4, 3


def layers():
    torch.manual_seed(0)
    return [nn.Linear(2, 2) for _ in range(STAGES)]


def loss_of(output, target):
    return ((output - target) ** 2).mean()


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    x, target = torch.arange(6.0).reshape(3, 2), torch.zeros(3, 2)
    own = {number: layers()[number] for number in (rank, STAGES - 1 - rank)}
    stages = [PipelineStage(one, number, STAGES, torch.device("cpu")) for number, one in own.items()]
    schedule = schedules.ScheduleZBVZeroBubble(stages, MICROBATCHES, loss_fn=loss_of, defer_pp_recv=True)
    losses = []
    if rank == 0:
        schedule.step(x, target=target, losses=losses)
        whole = nn.Sequential(*layers())
        expected = [float(loss_of(whole(a), b)) for a, b in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES))]
        found.put((expected, [float(one) for one in losses]))
    else:
        schedule.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    if not hasattr(schedules, "_defer_recv_ops"):
        print(f"torch {torch.__version__} cannot defer receives")
        sys.exit(2)
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found)) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        expected, got = found.get(timeout=100)
        for one in ranks:
            one.join()
    said = [[round(one, 4) for one in losses] for losses in (expected, got)]
    print(f"torch {torch.__version__}: expected the losses of the microbatches to be {said[0]}, got {said[1]}")
    sys.exit(not torch.allclose(torch.tensor(got), torch.tensor(expected)))
