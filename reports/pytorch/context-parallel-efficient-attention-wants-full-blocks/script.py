"""context_parallel: with memory-efficient attention, which float32 takes, parts of sequences have to be multiples of 32 tokens.

Two ranks, causal attention, 64 tokens: halves of the part of a rank have 16. The kernel fills the rows of its logsumexp up to 32,
and ring attention merges them with outputs that have 16. It has no form for CPUs: the script registers one in Python that returns
what the kernel for GPUs does, in the shapes that torch has for its op. Exit code 1: it raises, or values are wrong.
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
efficient = torch.ops.aten._scaled_dot_product_efficient_attention


def scores(q, k, causal, scale):
    found = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(found.shape[-2:]).tril().bool() if causal else torch.tensor(True)
    return found.masked_fill(~seen, -torch.inf)


def forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, *, scale=None):
    found = scores(q, k, causal, scale)
    lse = torch.zeros(efficient(*(one.to("meta") for one in (q, k, v)), None, with_lse)[1].shape)
    lse[:, :, : q.shape[2]] = found.logsumexp(-1)
    seed = torch.zeros((), dtype=torch.long)
    return found.softmax(-1) @ v, lse, seed, seed


def attention(query, key, value, is_causal=False):
    return efficient(query, key, value, None, True, 0.0, is_causal)[0]


#: Whether outputs are those of attention on one rank.
EXPECTED = {rank: {f"{tokens} tokens": True for tokens in (128, 64)} for rank in range(RANKS)}


def got(rank, mesh):
    found = {}
    plain = F.scaled_dot_product_attention
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_scaled_dot_product_efficient_attention", forward, "CPU")
    attention.__name__ = "scaled_dot_product_attention"
    for tokens in (128, 64):
        torch.manual_seed(0)
        buffers = [torch.randn(1, 1, tokens, 4) for _ in range(3)]
        F.scaled_dot_product_attention = plain
        want = F.scaled_dot_product_attention(*buffers, is_causal=True)
        F.scaled_dot_product_attention = attention
        try:
            with torch.no_grad(), context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 3):
                out = F.scaled_dot_product_attention(*buffers, is_causal=True)
        except RuntimeError as error:
            found[f"{tokens} tokens"] = str(error).splitlines()[0]
        else:
            parts = want.chunk(2 * RANKS, 2)
            found[f"{tokens} tokens"] = torch.allclose(out, torch.cat([parts[rank], parts[-1 - rank]], 2), atol=1e-4)
    return found


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
