"""An input that the backward needs may be offloaded. The caller's tensor loses its memory, although the caller may still read it.

`enable_activation_offloading` with `activation_offload_separate_stream`. The device is the CPU: streams and events do nothing, since all
runs in order, and host memory is not pinned. Exit code 1: the caller's tensor has lost its memory.
"""

import contextlib
import sys
import warnings
from unittest import mock

import torch
from torch import fx
from torch._functorch import config

try:
    from torch._functorch._activation_offloading import offload_ops
except ImportError:
    sys.exit(2)


class Stream:
    """A stream, or an event, that everything runs in order on."""

    def __getattr__(self, name: str):
        return lambda *args, **kwargs: None


def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ w


def mark(joint: fx.GraphModule, *args: object) -> fx.GraphModule:
    """Mark the first input, as users do with inputs of layers: what can be offloaded is for PyTorch to find out."""
    for node in joint.graph.nodes:
        if node.name == "primals_1":
            node.meta["should_offload"] = True
    return joint


@contextlib.contextmanager
def offloading():
    settings = {
        "joint_custom_pass": mark,
        "enable_activation_offloading": True,
        "activation_offload_separate_stream": True,
    }
    with (
        config.patch(settings),
        mock.patch.object(torch, "Event", Stream),
        mock.patch.object(torch.accelerator, "current_stream", lambda *_: Stream()),
        mock.patch.object(torch.accelerator, "set_stream", lambda *_: None),
        mock.patch.object(offload_ops, "_get_or_create_transfer_stream", lambda *_: Stream()),
        mock.patch.object(offload_ops, "_maybe_pool_alloc", lambda numel, dtype: torch.empty(numel, dtype=dtype)),
    ):
        yield


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if not hasattr(offload_ops, "wait_tensor") or not hasattr(offload_ops, "_maybe_pool_alloc"):
        sys.exit(2)
    x, w = torch.ones(2, 2), torch.full((2, 2), 0.5, requires_grad=True)
    with offloading():
        made = torch.compile(step, backend="aot_eager_default_partitioner")(x, w)
    left = x.untyped_storage().nbytes()
    print(f"torch {torch.__version__}, input x after the call: expected 16 bytes, {torch.ones(2, 2).tolist()}")
    print(f"torch {torch.__version__}, input x after the call: got      {left} bytes, {x.tolist() if left else 'nothing'}")
    sys.exit(int(left != 16))
