"""A zero-bubble schedule computes gradients of parameters twice that share an operation with a parameter of other operations.

One rank trains two stages. In the second, a bias is part of two sums, each with a bias of its own. Exit code 1: gradients differ from
those of the whole model.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

NAMES = ("first", "second", "shared")


class Biases(nn.Module):
    def __init__(self):
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.zeros(2)))

    def forward(self, x):
        return (x + (self.first + self.shared)) + (self.second + self.shared)


def layers():
    torch.manual_seed(0)
    return nn.Linear(2, 2), Biases()


def loss_of(output, target):
    return ((output - target) ** 2).mean()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    x, target = torch.arange(4.0).reshape(2, 2), torch.zeros(2, 2)
    whole, split = layers(), layers()
    loss_of(nn.Sequential(*whole)(x), target).backward()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        stages = [PipelineStage(one, number, 2, torch.device("cpu")) for number, one in enumerate(split)]
        ScheduleInterleavedZeroBubble(stages, 1, loss_fn=loss_of).step(x, target=target)
        dist.destroy_process_group()
    pairs = [(getattr(whole[1], name).grad, getattr(split[1], name).grad) for name in NAMES]
    expected, got = pairs[-1]
    print(f"torch {torch.__version__}: expected the gradient of the shared bias to be {expected.tolist()}")
    print(f"torch {torch.__version__}: got                                           {got.tolist()}")
    sys.exit(int(not all(torch.allclose(*pair) for pair in pairs)))
