"""A zero-bubble schedule fails on a stage that applies a linear layer twice, with a norm between.

One rank trains two stages. Exit code 1: the schedule raises, or gradients differ from those of the whole model.
"""

import logging
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.LayerNorm(2)

    def forward(self, x):
        return self.linear(self.norm(self.linear(x)))


def layers():
    torch.manual_seed(0)
    return nn.Linear(2, 2), Shared()


def loss_of(output, target):
    return ((output - target) ** 2).mean()


if __name__ == "__main__":
    logging.disable()  # the schedule logs all of its actions when one raises
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    x, target = torch.arange(4.0).reshape(2, 2), torch.zeros(2, 2)
    whole, split = layers(), layers()
    loss_of(nn.Sequential(*whole)(x), target).backward()
    expected = whole[1].linear.weight.grad
    print(f"torch {torch.__version__}: expected the gradient of the shared weight to be {expected.tolist()}")
    wrong = True
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        stages = [PipelineStage(one, number, 2, torch.device("cpu")) for number, one in enumerate(split)]
        schedule = ScheduleInterleavedZeroBubble(stages, 1, loss_fn=loss_of)
        try:
            schedule.step(x, target=target)
        except RuntimeError as error:
            print(f"torch {torch.__version__}: got      {type(error).__name__}: {str(error).partition(' (')[0]}")
        else:
            got = split[1].linear.weight.grad
            wrong = not torch.allclose(expected, got)
            print(f"torch {torch.__version__}: got      {got.tolist()}")
        dist.destroy_process_group()
    sys.exit(int(wrong))
