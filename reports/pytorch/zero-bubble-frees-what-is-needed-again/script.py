"""A zero-bubble schedule fails on a stage that applies a linear layer twice, with a norm between.

Two ranks train four stages, of which the second is such a stage. Exit code 1: a saved tensor is gone when its gradient is computed.
"""

import logging
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

STAGES, SHARING = 4, 1


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        return self.linear(self.norm(self.linear(x)))


def layers():
    torch.manual_seed(0)
    return [Shared() if number == SHARING else nn.Linear(2, 2) for number in range(STAGES)]


def loss_of(output, target):
    return ((output - target) ** 2).mean()


def run(rank, store, found):
    logging.disable()  # a schedule that raises logs all of its actions
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x, target = torch.arange(8.0).reshape(4, 2), torch.zeros(4, 2)
    own = {number: one for number, one in enumerate(layers()) if number % 2 == rank}
    # What a microbatch is between stages; without it, ranks ask each other.
    like = torch.zeros(2, 2, requires_grad=True)
    stages = [
        PipelineStage(one, number, STAGES, torch.device("cpu"), (like if number else like.detach(),), (like,))
        for number, one in own.items()
    ]
    schedule = ScheduleInterleavedZeroBubble(stages, 2, loss_fn=loss_of)
    try:
        schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
        said = f"the gradient of the shared weight {own[SHARING].linear.weight.grad.tolist()}" if rank == 1 else ""
    except RuntimeError as error:
        said = str(error)
    if rank == 1:
        found.put(said)


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found), daemon=True) for rank in range(2)]
        for one in ranks:
            one.start()
        got = found.get(timeout=100)
        for one in ranks:
            one.kill()  # a peer may wait for the one that failed
            one.join()
    if not got.startswith(("the gradient", "Trying to backward")):
        raise RuntimeError(got)  # which is not what this is about
    whole = layers()
    loss_of(nn.Sequential(*whole)(torch.arange(8.0).reshape(4, 2)), torch.zeros(4, 2)).backward()
    expected = whole[SHARING].linear.weight.grad.tolist()
    print(f"torch {torch.__version__}: expected the gradient of the shared weight {expected}")
    print(f"torch {torch.__version__}: got      {got.partition(' (')[0]}")
    sys.exit(int(got.startswith("Trying to backward")))
