"""A product of the current stream is read on a side stream. Compiled code deletes it at once; the allocator gives its memory to the next product.

Inductor writes the code for a CPU here, where it chooses buffers and streams as for a GPU. Streams are annotated and events are called as
TorchDynamo does it for torch.Stream and torch.Event. In this run the side stream is slow: what it is given runs when the current
stream waits for it. Memory comes from an allocator that does what CUDA's does: what is deleted goes back to the stream that allocated it.
It needs no GPU and no C++ compiler. Exit code 1: compiled code gives another value than eager code.
"""

import builtins
import sys
import warnings
import weakref
from unittest import mock

import torch
from torch.fx import traceback

try:
    from torch._dynamo.variables import streams
    from torch._inductor import config, stream_utils  # noqa: F401
    from torch._inductor.select_algorithm import extern_kernels
    from torch._inductor.utils import run_and_get_code
except ImportError:  # this version writes no streams into compiled code
    sys.exit(2)

SIDE = 5


def step(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = x @ w
    torch.ops.streams.record_event(10, 0)
    torch.ops.streams.wait_event(10, SIDE)
    with traceback.annotate({"stream": SIDE}):
        aside = made @ w
        torch.ops.streams.record_event(11, SIDE)
    other = w @ x[:, :2]  # of another size, so that compiled code itself does not use the buffer of `made` again
    torch.ops.streams.wait_event(11, 0)
    return aside, other  # in eager code, `made` lives until here


class Device:
    """A current stream that runs at once, a side stream that runs when it is waited for, and an allocator with a pool for each."""

    def __init__(self) -> None:
        self.on_side = False
        self.late: list[tuple] = []
        self.free: dict[bool, list[torch.Tensor]] = {False: [], True: []}
        self.mm = extern_kernels.mm

    def empty_strided(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        pool = self.free[self.on_side]
        block = pool.pop() if pool else torch.empty(512, dtype=torch.uint8)
        made = torch.as_strided(block.view(dtype), size, stride)
        weakref.finalize(made, pool.append, block)
        return made

    def run(self, *operands: torch.Tensor, out: torch.Tensor) -> None:
        if self.on_side:  # a kernel has addresses, and keeps no tensor alive
            self.late.append(([one.detach() for one in operands], out.detach()))
        else:
            self.mm(*operands, out=out)

    def wait(self, event: int) -> None:
        if event == 11:
            for operands, out in self.late:
                self.mm(*operands, out=out)
            self.late.clear()


class Stream:
    """What compiled code enters."""

    def __init__(self, device: Device, side: bool) -> None:
        self.device, self.side = device, side

    def __enter__(self) -> None:
        self.device.on_side = self.side

    def __exit__(self, *_: object) -> None:
        self.device.on_side = False


class Event:
    def __init__(self, device: Device, number: int) -> None:
        self.device, self.number = device, number

    def record(self, stream: object) -> None:
        pass

    def wait(self, stream: object) -> None:
        self.device.wait(self.number)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    device = Device()
    builtins.default_stream, builtins.stream1 = Stream(device, side=False), Stream(device, side=True)
    torch.manual_seed(0)
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with (
        torch.no_grad(),
        config.patch(fx_graph_cache=False),
        mock.patch.object(streams, "_get_event_by_index", lambda number: Event(device, number)),
        mock.patch.object(streams, "_get_stream_by_index", lambda number: number),
        mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cpu", device.empty_strided),
        mock.patch.object(extern_kernels, "mm", device.run),
    ):
        got, (code,) = run_and_get_code(torch.compile(step), x, w)
    print(code[code.index("def call(") : code.index("return (")])
    expected = x @ w @ w
    print(
        f"torch {torch.__version__}: expected {expected[0].tolist()} as the first row of what the side stream computes"
    )
    print(f"torch {torch.__version__}: got      {got[0][0].tolist()}")
    sys.exit(int(not torch.allclose(got[0], expected)))
