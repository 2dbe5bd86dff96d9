"""Context parallelism as a pass: a training step on whole sequences becomes what a rank does with its part of them.

The model of a rank is run once, alone, on tensors that are zero, inside of `context_parallel`. Every op is recorded, with the
collectives that are asked of process groups. At the end each rank has the outputs and gradients of whole sequences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tcverify.errors import Unsupported
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.compat import forget_shardings, import_debugging, patch_attributes, shardings_untraced
from tcverify.pytorch.data_parallel import mesh_of
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.training_steps import read_step, record
from tcverify.strategies.training.attention import (
    CONTEXT_PARALLEL,
    SHOWN,
    AttentionStep,
    attention_by,
    attention_program,
)

Tensor = torch.Tensor

#: What is said of attention that context parallelism does not support.
_DECLINED = re.compile(r"Load balancing requires `is_causal=True`")


class ContextParallel(TorchPass):
    """Trains a model with attention on parts of sequences, under `context_parallel`.

    Options:
        api: what divides sequences: the "context" of `context_parallel`, or the "modules" that attend, by `_ContextParallel`.
        balanced: whether each rank has a part from the front and one from the back (`enable_load_balance`).
        rotate: how keys and values go around, as `set_rotate_method` takes it.
        buffers: what tokens and targets are: "copies", or "views" of one tensor.
        backward: whether it runs "inside" or "outside" of that context.
        recompute: whether the backward computes each layer again.

    Raises:
        Unsupported: the program is no training step of a model with attention, or has attention without a mask, which cannot be
            balanced.
    """

    name = "torch:context_parallel"

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        return Pipeline(
            entry="context_parallel",
            unreachable="the program holds gradients that are written out, which nothing differentiates",
        )

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule:
        step = read_step(gm, AttentionStep, attention_program, own=("tokens",), alike=CONTEXT_PARALLEL)
        if CONTEXT_PARALLEL not in gm.meta["groups"]:
            raise Unsupported(f"the mesh has no dim '{CONTEXT_PARALLEL}'")
        if options["api"] == "context" and options["recompute"] and options["backward"] == "outside":
            raise Unsupported("a layer that is computed again behind the context computes something else")
        forget_shardings()
        import_debugging()
        mesh = mesh_of(gm)[CONTEXT_PARALLEL]
        try:
            with shardings_untraced(), attention_by(step.kernel), _settings(options):
                return record(gm, step.inputs(), lambda values: _trained(step, mesh, values, options))
        except RuntimeError as error:
            if _DECLINED.search(str(error)):
                raise Unsupported(str(error)) from error
            raise


@contextmanager
def _settings(options: Mapping[str, Any]) -> Iterator[None]:
    """Set what context parallelism keeps in the module, meanwhile."""
    from torch.distributed.tensor.experimental import _attention

    kept = _attention._cp_options
    with patch_attributes(kept, enable_load_balance=options["balanced"], rotate_method=kept.rotate_method):
        _attention.set_rotate_method(options["rotate"])
        yield


def _trained(
    step: AttentionStep, mesh: Any, values: Mapping[str, Tensor], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Run the training step on the part of a rank, and return what it returns on whole sequences."""
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard

    inside = options["api"] == "modules" or options["backward"] == "inside"
    tokens = values["tokens"].clone()
    x, target, positions = tokens[:, :-1], tokens[:, 1:], values["positions"].clone()
    if options["buffers"] == "copies":
        x, target = x.clone(), target.clone()
    buffers = {"x": x, "target": target, "positions": positions}
    weights = {name: values[name].clone() for name in values if name not in ("tokens", "positions")}
    with _APIS[options["api"]](mesh, buffers, step, options) as (parts, attention):
        own = {name: one.clone().requires_grad_() for name, one in {"x": parts["x"], **weights}.items()}
        h = own["x"]
        for number in range(len(step.layers)):
            given = number, h, parts["positions"].clone(), own, attention()
            h = checkpoint(step.attend, *given, use_reentrant=False) if options["recompute"] else step.attend(*given)
        loss = step.loss_of(h, parts["target"].clone())
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    grads: dict[str, Any] = {name: one.grad for name, one in own.items()}
    outputs, grads["x"] = context_parallel_unshard(mesh, [step.show(h.detach()), grads["x"]], [SHOWN[step.shown][0], 1])
    total = loss.detach().clone()
    for one in (total, *(grads[name] for name in weights)):
        dist.all_reduce(one, group=mesh.get_group())
    return {
        "loss": total,
        "outputs": outputs,
        "grads": grads,
        "buffers": {name: one * 2 for name, one in buffers.items()},
    }


#: The dims of positions of buffers, by name.
_DIMS: Mapping[str, int] = {"x": 1, "target": 1, "positions": 0}

_Parts = tuple[Mapping[str, Tensor], Callable[[], Callable[..., Tensor]]]


@contextmanager
def _in_context(
    mesh: Any, buffers: Mapping[str, Tensor], step: AttentionStep, options: Mapping[str, Any]
) -> Iterator[_Parts]:
    """The buffers become parts of themselves inside of `context_parallel`, which replaces the function that attends."""
    from torch.distributed.tensor.experimental import context_parallel

    with context_parallel(mesh, buffers=[*buffers.values()], buffer_seq_dims=[_DIMS[name] for name in buffers]):
        yield buffers, lambda: F.scaled_dot_product_attention


@contextmanager
def _in_modules(
    mesh: Any, buffers: Mapping[str, Tensor], step: AttentionStep, options: Mapping[str, Any]
) -> Iterator[_Parts]:
    """Parts of buffers are made, and the modules that attend are told, as `parallelize_module` does."""
    from torch.distributed.tensor.experimental import _attention
    from torch.distributed.tensor.parallel import parallelize_module

    balancer = None
    if options["balanced"]:
        if step.length % (2 * mesh.size()):
            raise Unsupported(f"{step.length} tokens cannot be balanced over {mesh.size()} ranks")
        balancer = _attention._HeadTailLoadBalancer(step.length, mesh.size(), "cpu")
    dims = {name: _DIMS[name] for name in buffers}
    parts: Any = _attention._context_parallel_shard(mesh, dict(buffers), dims, balancer)
    _attention._enable_context_parallel_dispatcher()
    style = _attention._ContextParallel(seq_dim=2, attention_type=_attention._ContextParallel.AttentionType.SDPA)
    try:
        yield parts, lambda: parallelize_module(_Attention(), mesh, style)
    finally:
        _attention._disable_context_parallel_dispatcher()


class _Attention(nn.Module):
    """Attends."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **told: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **told)


#: How sequences are divided, by name.
_APIS = {"context": _in_context, "modules": _in_modules}


__all__ = ["ContextParallel"]
