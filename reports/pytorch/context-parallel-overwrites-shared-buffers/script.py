"""context_parallel: buffers that are views of one tensor overwrite each other, within the context and behind it.

Two ranks. The inputs are all tokens but the last, the labels all but the first: two views, as many training loops take them. Exit
code 1: a buffer holds other tokens than those of its part of the sequence.
"""

import datetime
import logging
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

RANKS = 2
TOKENS = [[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]]

#: Rank 0 has the first and the last token of each sequence, which balances causal attention; rank 1 has those between.
MINE = {0: slice(0, 4, 3), 1: slice(1, 3)}
EXPECTED = {
    rank: {
        "inputs within": [row[:-1][MINE[rank]] for row in TOKENS],
        "labels within": [row[1:][MINE[rank]] for row in TOKENS],
        "inputs behind": [row[:-1] for row in TOKENS],
        "labels behind": [row[1:] for row in TOKENS],
    }
    for rank in range(RANKS)
}


def got(rank, mesh):
    tokens = torch.tensor(TOKENS)
    buffers = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    with context_parallel(mesh, buffers=[*buffers.values()], buffer_seq_dims=[1, 1]):
        found = {f"{name} within": one.tolist() for name, one in buffers.items()}
    return {**found, **{f"{name} behind": one.tolist() for name, one in buffers.items()}}


def worker(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    time = datetime.timedelta(seconds=15)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=time)
    found.put((rank, got(rank, init_device_mesh("cpu", (RANKS,)))))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=worker, args=(rank, f"{folder}/store", found)) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        said = dict(found.get(timeout=120) for _ in ranks)
        for one in ranks:
            one.join()
    wrong = 0
    for rank in range(RANKS):
        for what, want in EXPECTED[rank].items():
            wrong += said[rank][what] != want
            print(f"rank {rank}, {what}: expected {want}, got {said[rank][what]}")
    print(f"torch {torch.__version__}")
    sys.exit(bool(wrong))
