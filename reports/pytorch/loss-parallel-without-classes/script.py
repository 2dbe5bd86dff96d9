"""loss_parallel: ranks that have no class leave out the first all_reduce; the ranks do not agree on what they compute.

Three ranks, two classes. Exit code 1: a gradient is missing or wrong.
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

RANKS = 3


def given():
    return torch.zeros(2, 2)


def loss_of(logits):
    return cross_entropy(logits, torch.tensor([0, 1]), reduction="sum")


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
        said = type(error).__name__  # the text names ports where another rank has failed
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
