"""FSDP2: clip_grad_norm_ with the infinity norm raises on the ranks that have no row of a parameter; the others wait for them.

Two ranks and a layer with one output feature, so that its weight has one row. Exit code 1: a rank has no norm.
"""

import datetime
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2


def loss_of(model):
    return model(torch.tensor([[3.0, -4.0]])).sum()


def norm_of(model, kind):
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0, kind)


def model_of():
    return nn.Linear(2, 1, bias=False)


def run(rank, store, found):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    time = datetime.timedelta(seconds=20)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=time)
    for kind in (2.0, torch.inf):
        model = fully_shard(model_of(), mesh=init_device_mesh("cpu", (RANKS,)))
        loss_of(model).backward()
        try:
            got = norm_of(model, kind).full_tensor().item()
        except RuntimeError as error:
            text = str(error)
            got = "a lost connection" if "gloo" in text else f"{type(error).__name__}: {text[:130]}"
        found.put((rank, kind, got))
    found.close()
    found.join_thread()
    os._exit(0)  # a rank may be stuck in a collective: do not wait for it


if __name__ == "__main__":
    spawn = mp.get_context("spawn")
    found = spawn.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [spawn.Process(target=run, args=(rank, f"{folder}/store", found), daemon=True) for rank in range(RANKS)]
        for one in ranks:
            one.start()
        norms = {(rank, kind): got for rank, kind, got in (found.get(timeout=100) for _ in range(2 * RANKS))}
    if any(norms[rank, 2.0] != 5.0 for rank in range(RANKS)):
        raise RuntimeError(f"the 2-norm is wrong as well: {norms}")
    model = model_of()
    loss_of(model).backward()
    expected = norm_of(model, torch.inf).item()
    for rank in range(RANKS):
        print(f"torch {torch.__version__}: rank {rank} expected the norm {expected}")
        print(f"torch {torch.__version__}: rank {rank} got      the norm {norms[rank, torch.inf]}")
    sys.exit(int(any(norms[rank, torch.inf] != expected for rank in range(RANKS))))
