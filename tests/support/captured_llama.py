"""Small models in the manner of Llama, tensor-parallel by DTensor, captured as AOTAutograd gives them to compilers.

Each function is called on every rank, in a process of its own that has a fake process group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from tcverify.capturing import Captured, capture

HIDDEN, HEADS, LAYERS, WORDS = 16, 4, 2, 32


class TakenApart(nn.Module):
    """RMSNorm as Llama's own code writes it: float32 inside, and the weight before or behind the cast back."""

    def __init__(self, weight_last: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.weight_last = weight_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * normed.to(x.dtype) if self.weight_last else (normed * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Attention in the ops that it is made of, or by the kernel that torch picks."""

    def __init__(self, kernel: bool) -> None:
        super().__init__()
        self.backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH] if kernel else [SDPBackend.MATH]
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (
            layer(x).view(batch, sequence, -1, HIDDEN // HEADS).transpose(1, 2) for layer in (self.wq, self.wk, self.wv)
        )
        with sdpa_kernel(self.backends):
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(attended.transpose(1, 2).reshape(batch, sequence, -1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, norm: str, kernel: bool) -> None:
        super().__init__()
        made = (
            nn.RMSNorm(HIDDEN, eps=1e-5) if norm == "module" else TakenApart(norm == "weight last") for _ in range(2)
        )
        self.attention_norm, self.mlp_norm = made
        self.attention, self.mlp = Attention(kernel), Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Embedding, blocks, a last norm, and logits; only the blocks are parallel."""

    def __init__(self, norm: str, kernel: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.blocks = nn.ModuleList(Block(norm, kernel) for _ in range(LAYERS))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-5)
        self.head = nn.Linear(HIDDEN, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


_PLAN = {
    **{f"attention.{name}": ColwiseParallel for name in ("wq", "wk", "wv")},
    "attention.wo": RowwiseParallel,
    **{f"mlp.{name}": ColwiseParallel for name in ("w1", "w3")},
    "mlp.w2": RowwiseParallel,
}


def _captured(
    mesh: DeviceMesh,
    norm: str = "module",
    *,
    dtype: torch.dtype = torch.float32,
    shape: Sequence[int] = (2, 8),
    training: bool = False,
    kernel: bool = False,
) -> Captured:
    torch.manual_seed(0)
    model = Llama(norm, kernel).to(dtype)
    for block in model.blocks:
        parallelize_module(block, mesh, {name: style() for name, style in _PLAN.items()})
    return capture(model, (torch.zeros(*shape, dtype=torch.int64),), training=training)


def _tp() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def module_norm() -> Captured:
    return _captured(_tp())


def taken_apart() -> Captured:
    return _captured(_tp(), "weight first")


def bf16() -> Captured:
    return _captured(_tp(), dtype=torch.bfloat16)


def bf16_weight_last() -> Captured:
    return _captured(_tp(), "weight last", dtype=torch.bfloat16)


def uneven() -> Captured:
    return _captured(_tp(), shape=(1, 7))


def over_batch() -> Captured:
    """Sequences of an odd length: the group divides the tokens of both, and neither sequence."""
    return _captured(_tp(), shape=(2, 7))


def training() -> Captured:
    return _captured(_tp(), training=True)


def kernel() -> Captured:
    return _captured(_tp(), kernel=True)


def grid() -> Captured:
    """Two ranks of tensor parallelism in each of two of data parallelism, which have tokens of their own."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    return _captured(mesh["tp"])
