"""An activation is saved for the backward and offloaded, and a view of it is returned. The caller's tensor loses its memory.

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


def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = x @ w
    return hidden @ w, hidden.view(-1)


def mark(joint: fx.GraphModule, *args: object) -> fx.GraphModule:
    """Mark activations for offloading, as users do: what can be offloaded is for PyTorch to find out."""
    for node in joint.graph.nodes:
        if node.name == "mm":  # hidden
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
    expected = step(x, w)
    with offloading():
        made = torch.compile(step, backend="aot_eager_default_partitioner")(x, w)
    wrong = False
    for name, want, got in zip(("first", "second"), expected, made):
        bytes_of = got.untyped_storage().nbytes()
        lost = bytes_of < want.untyped_storage().nbytes()
        print(f"torch {torch.__version__}, {name} result: expected {want.tolist()} in {want.untyped_storage().nbytes()} bytes")
        print(f"torch {torch.__version__}, {name} result: got      {'nothing' if lost else got.tolist()} in {bytes_of} bytes")
        wrong |= lost
    sys.exit(int(wrong))
