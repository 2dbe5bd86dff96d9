"""Models as users parallelise them, and the ways in which torch captures their graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from tcverify.capturing import Captured, capture, program_of
from tcverify.capturing.processes import CaptureSource, capture_all
from tcverify.ops import qualified_name
from tcverify.program import VARYING, Program
from tests.sizes import by_night

#: The mesh of every capture: two dims of two ranks.
MESH = {"dp": 2, "tp": 2}
WORLD = 4
VOCABULARY = 12
BATCH, LENGTH = 2, 4
LAYERS = by_night(2, 1)

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
    """Attention and feed-forward, each after a norm and with a residual."""

    def __init__(self, width: int, head: int, inner: int) -> None:
        super().__init__()
        self.attention_norm, self.norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.feed_forward = Attention(width, head), FeedForward(width, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.norm(x))


class Llama(nn.Module):
    """Blocks between an embedding and a projection to the vocabulary."""

    def __init__(self, width: int = 8, head: int = 2, inner: int = 16, layers: int = LAYERS) -> None:
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
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss.to_local() if isinstance(loss, DTensor) else loss


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
    """Shard a model. Every rank cuts its shards out of its own parameters, equal by the seed: a fake group sends none."""
    rows: dict[str, Any] = {"output_layouts": Shard(1)} if sequence else {}
    for layer in model.layers:
        plan: dict[str, Any] = {
            "attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(),
            "attention.v": ColwiseParallel(), "attention.o": RowwiseParallel(**rows),
            "feed_forward.up": ColwiseParallel(), "feed_forward.gate": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(**rows),
        }  # fmt: skip
        if sequence:
            whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            plan |= {
                "attention_norm": SequenceParallel(), "norm": SequenceParallel(), "attention": whole, "feed_forward": whole,
            }  # fmt: skip
        parallelize_module(layer, mesh, plan, src_data_rank=None)
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
        parallelize_module(model, mesh, outer, src_data_rank=None)


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
        return shards.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def gathered_parameters(mesh: DeviceMesh) -> Case:
    """Parameters kept as shards, each gathered in the forward: what simple_fsdp does."""
    model = Llama()
    for module in list(model.modules()):
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(
                    distribute_tensor(parameter, mesh["dp"], [Shard(0)], src_data_rank=None)
                )
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


def by_make_fx(case: Case) -> fx.GraphModule:
    """Op by op, parameters as attributes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def called(*args: torch.Tensor) -> Any:  # make_fx looks into modules that it is given itself
        return case.module(*args)

    with case.inside():
        return make_fx(called, tracing_mode="fake", _allow_non_fake_inputs=True)(*case.args)


def _compiled(case: Case) -> list[fx.GraphModule]:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    found: list[fx.GraphModule] = []

    def keep(graph: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        found.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    compiled = torch.compile(case.module, backend=backend, fullgraph=True)
    with case.inside():
        result = compiled(*case.args)
        if result.requires_grad:
            result.sum().backward()
    return found


def by_forward(case: Case) -> fx.GraphModule:
    """What torch.compile gives a backend for the forward."""
    return _compiled(case)[0]


def by_backward(case: Case) -> fx.GraphModule:
    """What torch.compile gives a backend for the backward."""
    return _compiled(case)[1]


def by_joint(case: Case) -> Captured:
    """AOTAutograd: forward and backward in one graph, without the compiler's front."""
    assert isinstance(case.module, nn.Module)
    with case.inside():
        return capture(case.module, case.args, training=True)


def by_capture(case: Case) -> Captured:
    """AOTAutograd, the forward alone."""
    assert isinstance(case.module, nn.Module)
    with case.inside():
        return capture(case.module, case.args)


def by_export(case: Case) -> torch.export.ExportedProgram:
    """torch.export."""
    assert isinstance(case.module, nn.Module)
    with case.inside():
        return torch.export.export(case.module, case.args)


WAYS: dict[str, Callable[[Case], Any]] = {
    "make_fx": by_make_fx, "forward": by_forward, "backward": by_backward, "joint": by_joint, "capture": by_capture,
    "export": by_export,
}  # fmt: skip


def _here(model: str, way: str) -> Any:
    """Capture a model on this rank, whose process group has been made."""
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    torch.manual_seed(0)
    return WAYS[way](MODELS[model](mesh))


#: Functions that capture, by "MODEL_by_WAY": `capture_all` finds them by name.
for _model in MODELS:
    for _way in WAYS:
        globals()[f"{_model}_by_{_way}"] = partial(_here, _model, _way)


def captured(model: str, way: str) -> Program:
    """Capture a model on all ranks, each in a separate process.

    Raises:
        ProgramError: it cannot be captured in this way.
    """
    sources = [CaptureSource(f"{__file__}:{model}_by_{way}", rank, WORLD) for rank in range(WORLD)]
    found: list[Captured] = []
    for graphs in capture_all(sources):
        assert isinstance(graphs, list)
        found += graphs
    # replicas that all see one batch would average equal gradients
    batch = {name: {"dp": VARYING} for name in ("arg0_1", "arg1_1")} if model == "data_parallel" else None
    return program_of(found, placements=batch)


def ops_of(program: Program) -> set[str]:
    """The ops that a program calls, by qualified name."""
    return {qualified_name(n.target) for graph in program.graphs for n in graph.nodes if n.op == "call_function"}
