"""`torch.compile`'s way from a graph to what runs: AOTAutograd, Inductor's passes, lowering, scheduler and generated code."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch.utils import _pytree as pytree

from tcverify.errors import Unsupported
from tcverify.program.graph import lazy_module
from tcverify.pytorch.base import TorchPass
from tcverify.pytorch.effects import define_shapes, effects_as
from tcverify.pytorch.end_to_end.pipeline import Pipeline
from tcverify.pytorch.functional import functional_copy
from tcverify.pytorch.kernels import define_kernel, forget_kernels
from tcverify.pytorch.recording import OpRecorder, record_compiled

Tensor = torch.Tensor


class Compile(TorchPass):
    """`torch.compile`: the graph becomes what Inductor's generated code does.

    The code is generated, loaded and called once, on a process group that moves nothing, and every op that it calls is recorded:
    which buffers it allocates, reuses and writes, which collectives it starts and where it waits. Kernels that would be C++
    are recorded as the ops that their loops consist of.

    Options: as `torch._inductor.config` names them; and `compiled_ranks`, which ranks are compiled: their peers keep the
    graph that they have; and `effects`, how opaque communication is registered, see `effects_as`.
    """

    name = "torch:compile"

    def rewrite(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> fx.GraphModule | None:
        if not is_compiled(options["compiled_ranks"], gm.meta["rank"]):
            return None
        define_shapes()
        module = functional_copy(gm)
        settings = {name: value for name, value in options.items() if name not in ("compiled_ranks", "effects")}
        with effects_as(options["effects"]), inductor(settings):
            graph = record_of(gm, module, OpRecorder())
        return lazy_module(torch.nn.Module(), graph)

    @classmethod
    def pipeline(cls, options: Mapping[str, Any]) -> Pipeline:
        settings = {name: value for name, value in options.items() if name not in ("compiled_ranks", "effects")}
        passes = "reorder_for_compute_comm_overlap_passes"
        return Pipeline(
            settings={**settings, passes: list(settings[passes])},
            compiled_ranks=options["compiled_ranks"],
            ordered=options["effects"] == "ordered",
        )


def record_of(gm: fx.GraphModule, module: fx.GraphModule, recorder: OpRecorder) -> fx.Graph:
    """What the generated code of a graph does.

    Args:
        gm: the graph, whose inputs and outputs it has.
        module: what is compiled, and used up.
        recorder: records it.

    Raises:
        Unsupported: an input, or a node that is returned, is not a tensor.
    """
    output = gm.graph.output_node()
    for node in output.all_input_nodes:
        if isinstance(node.meta.get("val"), (tuple, list)):
            raise Unsupported(f"output '{node.name}' is not a tensor")
    values = example_inputs(gm)
    compiled = compile_graph(module, values)
    _, tree = pytree.tree_flatten(_plain(output.args[0]))
    return record_compiled(
        lambda given: compiled(*given),
        list(zip((str(n.target) for n in gm.graph.nodes if n.op == "placeholder"), values, strict=True)),
        lambda got: pytree.tree_unflatten(pytree.tree_leaves(got), tree),
        recorder,
    )


def _plain(result: Any) -> Any:
    """What a graph returns, in containers that are not those of torch.fx."""
    return fx.node.map_aggregate(result, lambda x: x)


def is_compiled(which: str, rank: int) -> bool:
    """Whether an option such as "even" means a rank."""
    return {"all": True, "first": rank == 0, "even": rank % 2 == 0, "odd": rank % 2 == 1}[which]


def example_inputs(gm: fx.GraphModule) -> list[Tensor]:
    """Real inputs of the shapes that the metadata of the placeholders says. All of them are zero.

    Raises:
        Unsupported: an input is not a tensor.
    """
    found = []
    for node in gm.graph.nodes:
        if node.op != "placeholder":
            continue
        value = node.meta.get("val")
        if not isinstance(value, Tensor):
            raise Unsupported(f"input '{node.name}' is not a tensor")
        found.append(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_())
    return found


@contextlib.contextmanager
def inductor(settings: Mapping[str, Any]) -> Iterator[None]:
    """Compile with these settings of Inductor, without caches and subprocesses, and without a C++ compiler."""
    import torch._functorch.config as functorch
    import torch._inductor.config as config
    from torch._inductor import cpu_vec_isa
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.utils import fresh_cache

    quiet = {"compile_threads": 1, "size_asserts": False, "alignment_asserts": False, "fx_graph_cache": False}
    known = {name: value for name, value in {**quiet, **settings}.items() if _exists(config, name)}
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.no_grad())
        stack.enter_context(config.patch(known))
        stack.enter_context(functorch.patch(enable_autograd_cache=False))
        stack.enter_context(mock.patch.object(CppScheduling, "define_kernel", define_kernel))
        # Asking which vector instructions this machine has would compile C++.
        stack.enter_context(mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", list))
        stack.enter_context(fresh_cache())
        try:
            yield
        finally:
            forget_kernels()


def _exists(config: Any, name: str) -> bool:
    try:
        for part in name.split("."):
            config = getattr(config, part)
    except AttributeError:
        return False
    return True


def compile_graph(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Compile a graph, which is used up, as torch.compile does behind TorchDynamo.

    Returns:
        What takes its inputs one by one, and returns its outputs without the containers that they are in.
    """
    from torch._inductor.compile_fx import compile_fx

    output = gm.graph.output_node()
    output.args = (tuple(pytree.tree_leaves(_plain(output.args[0]))),)
    gm.recompile()
    return compile_fx(gm, inputs)


__all__ = ["Compile", "compile_graph", "example_inputs", "inductor", "is_compiled", "record_of"]
