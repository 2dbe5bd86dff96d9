"""torch.distributed.nn.functional: gradients of averages and maxima are those of other reductions.

Two ranks with the values 1 and 2 (and 1 behind them); losses are (rank + 1) times the result. Exit code 1: a gradient is wrong.
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
from torch.distributed.nn import functional

RANKS = 2


#: The loss of all ranks is 3 times the maximum, which is the 2 of rank 1; each reduce_scatter averages over two ranks.
EXPECTED = {
    0: {"all_reduce of MAX": 0.0, "reduce_scatter of SUM": [1.0, 2.0], "reduce_scatter of AVG": [0.5, 1.0]},
    1: {"all_reduce of MAX": 3.0, "reduce_scatter of SUM": [1.0, 2.0], "reduce_scatter of AVG": [0.5, 1.0]},
}


def got(rank):
    x = torch.full((1,), rank + 1.0, requires_grad=True)
    ((rank + 1) * functional.all_reduce(x, dist.ReduceOp.MAX)).sum().backward()
    found = {"all_reduce of MAX": x.grad.item()}
    for name in ("SUM", "AVG"):
        x = torch.full((2,), rank + 1.0, requires_grad=True)
        try:
            made = functional.reduce_scatter(torch.empty(1), list(x.chunk(RANKS)), getattr(dist.ReduceOp, name))
            ((rank + 1) * made).sum().backward()
            found[f"reduce_scatter of {name}"] = x.grad.tolist()
        except (RuntimeError, ValueError) as error:
            found[f"reduce_scatter of {name}"] = f"{type(error).__name__}: {str(error):.80}"
    return found


def worker(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    time = datetime.timedelta(seconds=15)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=time)
    found.put((rank, got(rank)))
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
