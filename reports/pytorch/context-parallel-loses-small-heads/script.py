"""context_parallel: attention of heads that are filled up for FlashAttention returns another shape.

Two ranks, heads of four elements. FlashAttention takes multiples of eight: scaled_dot_product_attention fills queries, keys and
values up, and cuts the result. The kernel has no form for CPUs: the script registers one in Python, and does what
scaled_dot_product_attention does on a GPU. Exit code 1: it raises, or outputs are not those of attention on one rank.
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
from torch.nn import functional as F

RANKS = 2
TOKENS = 8
SIZE = 4
flash = torch.ops.aten._scaled_dot_product_flash_attention
EXPECTED = {rank: {"outputs": True} for rank in range(RANKS)}


def scores(q, k, causal, scale):
    found = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(found.shape[-2:]).tril().bool() if causal else torch.tensor(True)
    return found.masked_fill(~seen, -torch.inf)


def forward(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    found = scores(q, k, causal, scale)
    rng = torch.zeros(2, dtype=torch.uint64)
    return found.softmax(-1) @ v, found.logsumexp(-1), None, None, q.shape[2], k.shape[2], rng, rng[0], q.new_empty(0)


def attention(query, key, value, is_causal=False):
    query, key, value = (F.pad(one, (0, 8 - SIZE)) for one in (query, key, value))
    return flash(query, key, value, 0.0, is_causal, scale=SIZE**-0.5)[0][..., :SIZE]


def got(rank, mesh):
    torch.manual_seed(0)
    buffers = [torch.randn(1, 1, TOKENS, SIZE) for _ in range(3)]
    want = F.scaled_dot_product_attention(*buffers, is_causal=True)
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    attention.__name__ = "scaled_dot_product_attention"
    F.scaled_dot_product_attention = attention
    with torch.no_grad(), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
        out = F.scaled_dot_product_attention(*buffers, is_causal=True)
    parts = want.chunk(2 * RANKS, 2)
    want = torch.cat([parts[rank], parts[-1 - rank]], 2)
    if out.shape != want.shape:
        return {"outputs": f"shape {tuple(out.shape)} instead of {tuple(want.shape)}"}
    return {"outputs": torch.allclose(out, want, atol=1e-4)}


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
