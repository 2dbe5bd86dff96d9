"""Private names of PyTorch that differ between its versions, and substitutes for a GPU."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree


def filter_known_options(function: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options that a function of this torch takes."""
    return {name: value for name, value in options.items() if name in inspect.signature(function).parameters}


@contextlib.contextmanager
def patch_attributes(module: Any, **values: Any) -> Iterator[None]:
    """Let a module have these attributes meanwhile; names that it does not have in this torch are left out."""
    with contextlib.ExitStack() as stack:
        for name, value in values.items():
            if hasattr(module, name):
                stack.enter_context(mock.patch.object(module, name, value))
        yield


@contextlib.contextmanager
def device_known() -> Iterator[None]:
    """Answer what estimates of run time ask the device: as an A100 would. The queries need a GPU, or triton."""
    from torch._inductor import comm_analysis
    from torch.utils import _runtime_estimation

    with (
        patch_attributes(comm_analysis, get_gpu_type=lambda: comm_analysis.NVIDIA_GPU_TYPE.AMPERE),
        patch_attributes(
            _runtime_estimation,
            get_device_tflops=lambda *_, **__: 312.0,  # dense, in tensor cores
            get_gpu_dram_gbps=lambda *_: 1555.0,
            get_device_dram_gbps=lambda *_: 1555.0,
        ),
    ):
        yield


@contextlib.contextmanager
def on_gpu(graph: fx.Graph) -> Iterator[None]:
    """Let the fake tensors of a graph say that they are on a GPU: estimates of memory count no other."""
    values = pytree.tree_leaves([node.meta.get("val") for node in graph.nodes])
    fakes = {id(one): one for one in values if isinstance(one, FakeTensor)}.values()
    were = [(one, one.fake_device) for one in fakes]
    try:
        for one, _ in were:
            one.fake_device = torch.device("cuda", 0)
        yield
    finally:
        for one, device in were:
            one.fake_device = device


def forget_shardings() -> None:
    """Clear DTensor's caches about ops: for another rank, results may differ."""
    from torch.distributed.tensor import DTensor

    propagate = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    propagate.cache.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # since 2.10
    if clear is not None:
        clear()


def import_debugging() -> None:
    """Import DTensor's package for debugging, of which context parallelism needs a part. Another part draws shardings, and needs
    numpy; without numpy, it is left out."""
    if importlib.util.find_spec("numpy") is not None:
        return
    name = "torch.distributed.tensor.debug._visualize_sharding"
    drawing: Any = types.ModuleType(name)
    drawing.visualize_sharding = lambda *_: None
    sys.modules[name] = drawing
    try:
        import torch.distributed.tensor.debug  # noqa: F401
    finally:
        del sys.modules[name]


@contextlib.contextmanager
def shardings_untraced() -> Iterator[None]:
    """Keep tracing and recording away from how DTensor finds placements: rules by decomposition run many ops, which are none of
    the program."""
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import _disable_current_modes

    propagator = DTensor._op_dispatcher.sharding_propagator
    find = propagator.propagate_op_sharding_non_cached

    def propagate(schema: Any) -> Any:
        with _disable_current_modes():
            return find(schema)

    with mock.patch.object(propagator, "propagate_op_sharding_non_cached", propagate):
        yield


__all__ = [
    "device_known",
    "filter_known_options",
    "forget_shardings",
    "import_debugging",
    "on_gpu",
    "patch_attributes",
    "shardings_untraced",
]
