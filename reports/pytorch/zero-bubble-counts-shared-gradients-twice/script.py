"""A zero-bubble schedule computes gradients of parameters twice that share an operation with a parameter of other operations.

Two ranks train four stages. In the second and the fourth, a bias is part of two sums, each with a bias of its own. The second registers it
last, the fourth first. Exit code 1: the gradients of the second differ from those of the whole model, and those of the fourth do not.
"""

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
ORDERS = {1: ("first", "second", "shared"), 3: ("shared", "first", "second")}


class Biases(nn.Module):
    def __init__(self, names):
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))

    def forward(self, x):
        return (x + (self.first + self.shared)) + (self.second + self.shared)


def layers():
    torch.manual_seed(0)
    return [Biases(ORDERS[number]) if number in ORDERS else nn.Linear(2, 2) for number in range(STAGES)]


def loss_of(output, target):
    return ((output - target) ** 2).mean()


def gradients(biases):
    return [getattr(biases, name).grad.tolist() for name in sorted(ORDERS[1])]


def same(expected, got):
    return torch.allclose(torch.tensor(expected), torch.tensor(got))


def run(rank, store, found):
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
    schedule.step(*([x] if rank == 0 else []), target=target if rank == 1 else None)
    if rank == 1:
        whole = layers()
        loss_of(nn.Sequential(*whole)(x), target).backward()
        found.put({number: [gradients(one[number]) for one in (whole, own)] for number in ORDERS})
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found), daemon=True) for rank in range(2)]
        for one in ranks:
            one.start()
        pairs = found.get(timeout=100)
        for one in ranks:
            one.join()
    if not same(*pairs[3]):
        raise RuntimeError("gradients are wrong in either order: pytorch/pytorch#180952")
    expected, got = pairs[1]
    print(f"torch {torch.__version__}: expected the gradient of the shared bias to be {expected[-1]}")
    print(f"torch {torch.__version__}: got                                           {got[-1]}")
    sys.exit(int(not same(expected, got)))
