"""Models as users parallelise them, and the ways in which torch captures their graphs.

Each model is built and captured on a fake process group, in a process of its own per rank: process groups, tracing and compilation
leave traces in a process. Run as a script it captures one model on one rank and prints the ops of the graphs:

    python -m tests.unit.captured_models MODEL WAY RANK
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

#: The mesh of every capture: two dims of two ranks.
MESH = {"dp": 2, "tp": 2}
WORLD = 4
VOCABULARY = 12
BATCH, LENGTH = 2, 4

# --------------------------------------------------------------------------------------------------------------- modules


class Attention(nn.Module):
    """Causal self-attention; the number of heads follows from the width of the projections, which may be a rank's share."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        q, k, v = (p(x).view(batch, length, -1, self.head).transpose(1, 2) for p in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    """A gated product of two projections, projected back."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, width: int, head: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, head), FeedForward(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.norm(x))


class Llama(nn.Module):
    """Two blocks between an embedding and a projection to the vocabulary."""

    def __init__(self, width: int = 8, head: int = 2, inner: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, head, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.output = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


class WithLoss(nn.Module):
    """A model and its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.model(ids)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Expert(nn.Module):
    """Tokens travel to the ranks of their experts and back, each rank sending as many as its neighbours in turn."""

    def __init__(self, group: Any, width: int = 8) -> None:
        super().__init__()
        self.group, self.expert = group, FeedForward(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        there = collectives.all_to_all_single_autograd(x, None, None, self.group)
        back = collectives.all_to_all_single_autograd(self.expert(there), None, None, self.group)
        return x + back


# ---------------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class Case:
    """What is captured: a module, or a function of tensors, and its arguments."""

    module: nn.Module | Callable[..., Any]
    args: tuple[torch.Tensor, ...]
    inside: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext


def _ids() -> torch.Tensor:
    return torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) % VOCABULARY


def _labels() -> torch.Tensor:
    return (_ids() + 1) % VOCABULARY


def _tensor_parallel(model: Llama, mesh: DeviceMesh, *, sequence: bool = False, vocabulary: bool = False) -> None:
    rows = {"output_layouts": Shard(1)} if sequence else {}
    columns = {"input_layouts": Shard(1)} if False else {}
    for layer in model.layers:
        plan: dict[str, Any] = {
            "attention.q": ColwiseParallel(**columns), "attention.k": ColwiseParallel(**columns),
            "attention.v": ColwiseParallel(**columns), "attention.o": RowwiseParallel(**rows),
            "feed_forward.up": ColwiseParallel(**columns), "feed_forward.gate": ColwiseParallel(**columns),
            "feed_forward.down": RowwiseParallel(**rows),
        }  # fmt: skip
        if sequence:
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {
                "attention_norm": SequenceParallel(), "norm": SequenceParallel(), "attention": whole, "feed_forward": whole,
            }  # fmt: skip
        parallelize_module(layer, mesh, plan)
    outer: dict[str, Any] = {}
    if vocabulary:
        outer["embedding"] = RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1) if sequence else Replicate()
        )
        outer["output"] = ColwiseParallel(
            input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Shard(-1), use_local_output=False
        )
    elif sequence:
        outer["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        outer["output"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    if sequence:
        outer["norm"] = SequenceParallel()
    if outer:
        parallelize_module(model, mesh, outer)


def tensor_parallel(mesh: DeviceMesh) -> Case:
    """Colwise and rowwise projections."""
    model = Llama()
    _tensor_parallel(model, mesh["tp"])
    return Case(model, (_ids(),))


def sequence_parallel(mesh: DeviceMesh) -> Case:
    """As above, with the sequence divided between the blocks' halves, and an embedding divided by rows."""
    model = Llama()
    _tensor_parallel(model, mesh["tp"], sequence=True)
    return Case(model, (_ids(),))


def training(mesh: DeviceMesh) -> Case:
    """Tensor parallel, with a loss."""
    model = Llama()
    _tensor_parallel(model, mesh["tp"])
    return Case(WithLoss(model), (_ids(), _labels()))


def vocabulary_parallel(mesh: DeviceMesh) -> Case:
    """Embedding and loss divided by the vocabulary."""
    model = Llama()
    _tensor_parallel(model, mesh["tp"], vocabulary=True)
    return Case(WithLoss(model), (_ids(), _labels()), loss_parallel)


def fully_sharded(mesh: DeviceMesh) -> Case:
    """FSDP2."""
    from torch.distributed.fsdp import fully_shard

    model = Llama()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return Case(model, (_ids(),))


class _Replicated(nn.Module):
    """A parametrisation: the parameter is kept as shards and gathered where it is used."""

    def forward(self, shards: torch.Tensor) -> torch.Tensor:
        assert isinstance(shards, DTensor)
        return shards.redistribute(placements=[Replicate()]).to_local(grad_placements=[_partial()])


def _partial() -> Any:
    from torch.distributed.tensor import Partial

    return Partial("avg")


def gathered_parameters(mesh: DeviceMesh) -> Case:
    """Parameters kept as shards, each gathered in the forward: what simple_fsdp does."""
    model = Llama()
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(distribute_tensor(parameter, mesh["dp"], [Shard(0)]))
                nn.utils.parametrize.register_parametrization(module, name, _Replicated(), unsafe=True)
    return Case(WithLoss(model), (_ids(), _labels()))


def data_parallel(mesh: DeviceMesh) -> Case:
    """Gradients, averaged over the replicas."""
    model, group = WithLoss(Llama()), mesh["dp"].get_group()
    parameters = list(model.parameters())

    def step(ids: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        gradients = torch.autograd.grad(model(ids, labels), parameters)
        return [collectives.all_reduce(gradient, "avg", group) for gradient in gradients]

    return Case(step, (_ids(), _labels()))


def context_parallel(mesh: DeviceMesh) -> Case:
    """Ring attention, as context_parallel calls it: keys and values travel around the group; graphs differ by rank."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as ring

    ring._cp_options.rotate_method = ring._RotateMethod.ALL_TO_ALL
    q, k, v = (torch.ones(1, 2, 8, 4) for _ in range(3))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ring._scaled_dot_product_ring_flash_attention(mesh["tp"], q, k, v, is_causal=True)[0]

    return Case(attend, (q, k, v))


def expert_parallel(mesh: DeviceMesh) -> Case:
    """Tokens travel to experts and back."""
    return Case(Expert(mesh["tp"].get_group()), (torch.ones(4, 8),))


MODELS: dict[str, Callable[[DeviceMesh], Case]] = {
    f.__name__: f
    for f in (
        tensor_parallel, sequence_parallel, training, vocabulary_parallel, fully_sharded, gathered_parameters,
        data_parallel, context_parallel, expert_parallel,
    )
}  # fmt: skip

# ------------------------------------------------------------------------------------------------------------------ ways


def _arguments(case: Case) -> tuple[torch.Tensor, ...]:
    return case.args


def by_make_fx(case: Case) -> list[fx.GraphModule]:
    """The forward, op by op, parameters as attributes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with case.inside():
        traced = make_fx(lambda *args: case.module(*args), tracing_mode="fake", _allow_non_fake_inputs=True)(*case.args)
    return [traced]


def by_compile(case: Case) -> list[fx.GraphModule]:
    """What torch.compile gives its backend: the forward and the backward graph, parameters as inputs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(graph)
        return graph.forward

    compiled = torch.compile(
        case.module,
        backend=aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition),
        fullgraph=True,
    )
    with case.inside():
        result = compiled(*case.args)
        if isinstance(result, torch.Tensor) and result.requires_grad:
            result.sum().backward()
    return found


def by_joint(case: Case) -> list[fx.GraphModule]:
    """Forward and backward in one graph."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    assert isinstance(case.module, nn.Module)
    with contextlib.ExitStack() as stack, case.inside():
        return [aot_export_joint_with_descriptors(stack, case.module, case.args).graph_module]


def by_export(case: Case) -> list[fx.GraphModule]:
    """torch.export."""
    assert isinstance(case.module, nn.Module)
    with case.inside():
        program = torch.export.export(case.module, case.args)
    return [program.graph_module]


WAYS: dict[str, Callable[[Case], list[fx.GraphModule]]] = {
    "make_fx": by_make_fx, "compile": by_compile, "joint": by_joint, "export": by_export,
}  # fmt: skip


def captured(model: str, way: str, rank: int) -> list[fx.GraphModule]:
    """Capture a model on one rank of `MESH`. Leaves this process with a fake process group."""
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    torch.manual_seed(0)
    return WAYS[way](MODELS[model](mesh))


def ops_of(graphs: Sequence[fx.GraphModule]) -> dict[str, int]:
    """How often each op is called, by qualified name."""
    from tcverify.ops import qualified_name

    found: dict[str, int] = {}
    for graph in graphs:
        for node in graph.graph.nodes:
            name = qualified_name(node.target) if node.op == "call_function" else f"<{node.op}>"
            found[name] = found.get(name, 0) + 1
    return found


if __name__ == "__main__":
    for name, count in sorted(ops_of(captured(sys.argv[1], sys.argv[2], int(sys.argv[3]))).items()):
        print(f"{count:5} {name}")
