"""context_parallel: a backward behind the context gives wrong gradients, without a word.

Two ranks, causal attention, one head of four tokens each. The forward runs within the context, the backward either there or behind it. FlashAttention
has no kernel for CPUs: the script registers one in Python that computes what the kernel for GPUs does, and calls its op, which is
what scaled_dot_product_attention does on a GPU. Exit code 1: a gradient is wrong.
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
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.nn import functional as F

RANKS = 2
TOKENS = 8
flash = torch.ops.aten._scaled_dot_product_flash_attention


def scores(q, k, causal, scale):
    found = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(found.shape[-2:]).tril().bool() if causal else torch.tensor(True)
    return found.masked_fill(~seen, -torch.inf)


def forward(q, k, v, dropout=0.0, causal=False, debug=False, *, scale=None):
    found = scores(q, k, causal, scale)
    rng = torch.zeros(2, dtype=torch.uint64)
    return found.softmax(-1) @ v, found.logsumexp(-1), None, None, q.shape[2], k.shape[2], rng, rng[0], q.new_empty(0)


def backward(grad, q, k, v, out, lse, *others, scale=None):
    weights = torch.exp(scores(q, k, others[5], scale) - lse.unsqueeze(-1))
    of_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return of_scores @ k, of_scores.mT @ q, weights.mT @ grad


def attention(query, key, value, is_causal=False):
    return flash(query, key, value, 0.0, is_causal)[0]


def inputs():
    torch.manual_seed(0)
    return [torch.randn(1, 1, TOKENS, 8) for _ in range(4)]


def expected():
    *given, grad = inputs()
    given = [one.requires_grad_() for one in given]
    F.scaled_dot_product_attention(*given, is_causal=True).backward(grad)
    return [one.grad for one in given]


#: Whether gradients are those of attention on one rank.
EXPECTED = {rank: {f"gradient of the {name}, backward {where}": True for where in ("within", "behind") for name in ("queries", "keys", "values")} for rank in range(RANKS)}


def got(rank, mesh):
    found = {}
    wanted = expected()
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_scaled_dot_product_flash_attention", forward, "CPU")
    kernels.impl("_scaled_dot_product_flash_attention_backward", backward, "CPU")
    attention.__name__ = "scaled_dot_product_attention"
    F.scaled_dot_product_attention = attention
    for where in ("within", "behind"):
        buffers = inputs()
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            *own, grad = (one.clone() for one in buffers)
            own = [one.requires_grad_() for one in own]
            out = F.scaled_dot_product_attention(*own, is_causal=True)
            if where == "within":
                out.backward(grad)
        if where == "behind":
            out.backward(grad)
        whole = context_parallel_unshard(mesh, [one.grad for one in own], [2] * 3)
        for name, one, want in zip(("queries", "keys", "values"), whole, wanted, strict=True):
            found[f"gradient of the {name}, backward {where}"] = torch.allclose(one, want, atol=1e-4)
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
