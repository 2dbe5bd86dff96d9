"""`torch.distributed.pipelining.pipeline` of a model whose second and third stage both read the first: they take each other's place.

Four ranks run the four stages of a traced model under GPipe. Exit code 1: the result is not that of the model.
"""

import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import ScheduleGPipe, pipe_split, pipeline

STAGES = 4


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(2, 2) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        pipe_split()
        left = self.left(x)
        pipe_split()
        right = self.right(x)
        pipe_split()
        return left - 2 * right


def run(rank, store, found):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=STAGES)
    torch.manual_seed(0)
    model, x = Branches(), torch.arange(2.0 * STAGES).reshape(STAGES, 2)
    stage = pipeline(model, (x[:1],)).build_stage(rank, torch.device("cpu"))
    output = ScheduleGPipe(stage, STAGES).step(*([x] if rank == 0 else []))
    if rank == STAGES - 1:
        found.put((model(x)[0].tolist(), output[0].tolist()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found)) for rank in range(STAGES)]
        for one in ranks:
            one.start()
        expected, got = found.get(timeout=100)
        for one in ranks:
            one.join()
    print(f"torch {torch.__version__}: expected the first row to be {expected}")
    print(f"torch {torch.__version__}: got                           {got}")
    sys.exit(int(not torch.allclose(torch.tensor(expected), torch.tensor(got))))
