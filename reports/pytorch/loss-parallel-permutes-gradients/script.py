"""loss_parallel: for logits of images, the gradient of each pixel is that of another one.

Two ranks, two classes, an image of two by two pixels. Exit code 1: a gradient is wrong.
"""

import datetime
import logging
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

RANKS = 2


def given():
    return torch.zeros(1, 2, 2, 2)


def loss_of(logits):
    target = torch.tensor([[[0, 1], [0, 0]]])
    return cross_entropy(logits, target, reduction="sum")


def shown(said):
    if isinstance(said, str):
        return said
    return [round(one, 4) for one in said]


def parallel(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.WARNING)
    time = datetime.timedelta(seconds=15)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=time)
    logits = given()
    sharded = distribute_tensor(logits, init_device_mesh("cpu", (RANKS,)), [Shard(1)], src_data_rank=None)
    sharded.requires_grad_()
    try:
        with loss_parallel():
            loss_of(sharded).backward()
        said = sharded.grad.full_tensor().flatten().tolist()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    found.put((rank, said))


if __name__ == "__main__":
    logits = given().requires_grad_()
    loss_of(logits).backward()
    expected = logits.grad.flatten().tolist()
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=parallel, args=(rank, f"{folder}/store", found)) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        results = dict(found.get(timeout=100) for _ in ranks)
        for one in ranks:
            one.join()

    def same(said):
        return not isinstance(said, str) and torch.allclose(torch.tensor(said), torch.tensor(expected))

    for rank in range(RANKS):
        said = results[rank]
        print(f"gradient of the logits on rank {rank}: expected {shown(expected)}, got {shown(said)}")
    print(f"torch {torch.__version__}")
    sys.exit(not all(map(same, results.values())))
