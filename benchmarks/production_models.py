"""Models of everyday size and parallelism, and the files that torch.compile leaves of them; nothing is computed.

Run as a script, it writes one `fx_graph_runnable` of the forward and one of the backward pass, as rank `--rank` of a job of
fake process groups compiles them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
from torch import nn
from torch._dynamo.repro.after_aot import save_graph_repro
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.utils import parametrize
from torch.testing._internal.distributed.fake_pg import FakeStore


@dataclass(frozen=True)
class Sizes:
    """Of a model: as published, but for the number of layers."""

    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    inner: int = 14336
    vocabulary: int = 128256
    layers: int = 32
    batch: int = 1
    length: int = 2048
    experts: int = 64
    chosen: int = 6


class Attention(nn.Module):
    """Causal attention with rotary positions; queries share keys and values in groups."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        self.head = s.width // s.heads
        self.q = nn.Linear(s.width, s.width, bias=False)
        self.k, self.v = (nn.Linear(s.width, s.kv_heads * self.head, bias=False) for _ in range(2))
        self.o = nn.Linear(s.width, s.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q, k, v = (p(x).view(batch, length, -1, self.head).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        scores = (q @ k.transpose(-1, -2)) / self.head**0.5
        mask = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        mixed = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class LatentAttention(nn.Module):
    """Attention whose keys and values are made of a narrow latent vector (DeepSeek)."""

    def __init__(self, s: Sizes, latent: int = 512) -> None:
        super().__init__()
        self.head = s.width // s.heads
        self.down, self.norm = nn.Linear(s.width, latent, bias=False), nn.RMSNorm(latent)
        self.q = nn.Linear(s.width, s.width, bias=False)
        self.up = nn.Linear(latent, 2 * s.width, bias=False)
        self.o = nn.Linear(s.width, s.width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q = self.q(x).view(batch, length, -1, self.head).transpose(1, 2)
        both = self.up(self.norm(self.down(x))).view(batch, length, -1, 2 * self.head).transpose(1, 2)
        k, v = both.split(self.head, -1)
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        mixed = ((q @ k.transpose(-1, -2)) / self.head**0.5).softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """A gated product of two projections, projected back."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Tokens are sent to the ranks of the experts that a gate chooses, a fixed number to each, and back."""

    def __init__(self, s: Sizes, group: Any, ranks: int) -> None:
        super().__init__()
        self.group, self.experts, self.chosen = group, s.experts, s.chosen
        self.capacity = max(ranks, s.batch * s.length * s.chosen // s.experts)
        own = s.experts // ranks
        self.gate = nn.Linear(s.width, s.experts, bias=False)
        inner = s.inner // 8
        self.up = nn.Parameter(torch.empty(own, s.width, inner))
        self.down = nn.Parameter(torch.empty(own, inner, s.width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        weights, _ = self.gate(flat).softmax(-1).topk(self.chosen, -1)
        picked = (self.gate(flat).softmax(-1) >= weights[:, -1:]).to(x.dtype)  # token × expert
        _, order = picked.topk(self.capacity, 0)  # the tokens of each expert
        sent = flat[order.t().reshape(-1)]  # expert · capacity × width
        there = collectives.all_to_all_single_autograd(sent, None, None, self.group)
        own = self.up.shape[0]
        there = there.view(-1, own, self.capacity, x.shape[-1]).transpose(0, 1).reshape(own, -1, x.shape[-1])
        done = torch.bmm(F.silu(torch.bmm(there, self.up)), self.down)
        done = done.view(own, -1, self.capacity, x.shape[-1]).transpose(0, 1).reshape(-1, x.shape[-1])
        back = collectives.all_to_all_single_autograd(done, None, None, self.group)
        return torch.zeros_like(flat).index_add(0, order.t().reshape(-1), back).view(x.shape)


class Block(nn.Module):
    """Attention and feed-forward, each after a norm and with a residual."""

    def __init__(self, s: Sizes, attention: nn.Module, after: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(s.width), nn.RMSNorm(s.width)
        self.attention, self.after = attention, after

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.after(self.norm(x))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Blocks between an embedding and a projection to the vocabulary, and a loss."""

    def __init__(self, s: Sizes, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(s.vocabulary, s.width)
        self.layers = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(s.width)
        self.output = nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.output(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Gathered(nn.Module):
    """Makes a parameter of the shards of it that the ranks of a group keep (simple_fsdp)."""

    def __init__(self, group: Any, placements: Sequence[Any] | None = None, mesh: DeviceMesh | None = None) -> None:
        super().__init__()
        self.group, self.placements, self.mesh = group, placements, mesh

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        whole = collectives.all_gather_tensor_autograd(shard, 0, self.group)
        if self.mesh is None or self.placements is None:
            return whole  # type: ignore[no-any-return]
        return DTensor.from_local(whole, self.mesh, self.placements, run_check=False)


# ------------------------------------------------------------------------------------------------------ parallelism


def llama_tp(s: Sizes, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel; what lies between the products is divided by the sequence."""
    model = Model(s, [Block(s, Attention(s), FeedForward(s.width, s.inner)) for _ in range(s.layers)])
    tp = mesh["tp"]
    parallelize_module(
        model,
        tp,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
        src_data_rank=None,
    )
    for block in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attention.q": ColwiseParallel(),
            "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(),
            "attention.o": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "after": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "after.up": ColwiseParallel(),
            "after.gate": ColwiseParallel(),
            "after.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tp, plan, src_data_rank=None)
    return model


def llama_fsdp(s: Sizes, mesh: DeviceMesh) -> nn.Module:
    """Every parameter is kept as shards on all ranks, and gathered where it is read."""
    model = Model(s, [Block(s, Attention(s), FeedForward(s.width, s.inner)) for _ in range(s.layers)])
    _shard_parameters(model, mesh.get_group("dp"), mesh["dp"].size())
    return model


def llama_fsdp_tp(s: Sizes, mesh: DeviceMesh) -> nn.Module:
    """Tensor parallel within a dim of the mesh; the shards of that are divided over the other one."""
    model = llama_tp(s, mesh)
    _shard_parameters(model, mesh.get_group("dp"), mesh["dp"].size())
    return model


def deepseek_ep(s: Sizes, mesh: DeviceMesh) -> nn.Module:
    """Experts on the ranks of one dim of the mesh; parameters as shards on those of the other."""
    group, ranks = mesh.get_group("tp"), mesh["tp"].size()
    model = Model(s, [Block(s, LatentAttention(s), Experts(s, group, ranks)) for _ in range(s.layers)])
    _shard_parameters(model, mesh.get_group("dp"), mesh["dp"].size())
    return model


def _shard_parameters(model: nn.Module, group: Any, ranks: int) -> None:
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            placed = parameter.placements if isinstance(parameter, DTensor) else None
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if local.shape[0] % ranks:
                continue
            shard = nn.Parameter(torch.empty(local.shape[0] // ranks, *local.shape[1:], dtype=local.dtype))
            setattr(module, name, shard)
            parametrize.register_parametrization(module, name, Gathered(group, placed, mesh), unsafe=True)


#: Model families: how each is made and its usual sizes.
FAMILIES: dict[str, tuple[Callable[[Sizes, DeviceMesh], nn.Module], Sizes]] = {
    "llama-tp": (llama_tp, Sizes()),
    "llama-fsdp": (llama_fsdp, Sizes()),
    "llama-fsdp-tp": (llama_fsdp_tp, Sizes()),
    "deepseek-ep": (deepseek_ep, Sizes(width=2048, heads=16, kv_heads=16, inner=10944, vocabulary=102400, layers=27)),
}


def write_artifacts(
    family: str, folder: Path, dp: int, tp: int, rank: int = 0, layers: int | None = None
) -> list[Path]:
    """Compile a model as one rank, and write its graphs as torch writes them; returns the files, the forward graph first."""
    make, sizes = FAMILIES[family]
    sizes = sizes if layers is None else Sizes(**{**sizes.__dict__, "layers": layers})
    dist.init_process_group("fake", rank=rank, world_size=dp * tp, store=FakeStore())
    written: list[Path] = []

    def keep(kind: str) -> Callable[..., Any]:
        def compiler(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            path = folder / f"fx_graph_runnable_{family}_{dp}x{tp}_{kind}.txt"
            with path.open("w") as file:
                save_graph_repro(file, module, inputs, "inductor")
            written.append(path)
            return make_boxed_func(module.forward)

        return compiler

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        forward, backward = keep("forward"), keep("backward")
        return aot_module_simplified(module, inputs, forward, backward, decompositions=select_decomp_table())

    try:
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        with FakeTensorMode(allow_non_fake_inputs=True):
            torch.set_default_dtype(torch.bfloat16)
            model = make(sizes, mesh)
            ids = torch.zeros(sizes.batch, sizes.length, dtype=torch.int64)
            table = torch.empty(sizes.length, sizes.width // sizes.heads, dtype=torch.bfloat16)
            loss = torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(ids, ids, table, table)
            (loss.full_tensor() if isinstance(loss, DTensor) else loss).backward()
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()
    return sorted(written, reverse=True)


@click.command()
@click.argument("family", type=click.Choice(list(FAMILIES)))
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False))
@click.option("--dp", default=8)
@click.option("--tp", default=8)
@click.option("--rank", default=0)
@click.option("--layers", type=int)
def main(family: str, folder: Path, dp: int, tp: int, rank: int, layers: int | None) -> None:
    """Write the graphs of a model of FAMILY into FOLDER."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in write_artifacts(family, folder, dp, tp, rank, layers):
        click.echo(f"{path}: {path.read_text().count(' = torch.ops.')} calls")


if __name__ == "__main__":
    main()
