"""A product of the current stream is read on a side stream. Compiled code gives its memory to the next product of the current stream at once.

Inductor writes the code for a CPU here, where it chooses buffers and streams as for a GPU. Streams are annotated and events are called as
TorchDynamo does it for torch.Stream and torch.Event; in this run the side stream is slow: what it is given runs when the current
stream waits for it. It needs no GPU and no C++ compiler. Exit code 1: compiled code gives another value than eager code.
"""

import builtins
import sys
import warnings
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
    other = w @ x
    torch.ops.streams.wait_event(11, 0)
    return aside, other


class Device:
    """A current stream that runs at once, and a side stream that runs when it is waited for."""

    def __init__(self) -> None:
        self.on_side = False
        self.late: list[tuple] = []
        self.mm = extern_kernels.mm

    def run(self, *args, **kwargs) -> None:
        if self.on_side:
            self.late.append((args, kwargs))
        else:
            self.mm(*args, **kwargs)

    def wait(self, event: int) -> None:
        if event == 11:
            for args, kwargs in self.late:
                self.mm(*args, **kwargs)
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
        mock.patch.object(extern_kernels, "mm", device.run),
    ):
        got, (code,) = run_and_get_code(torch.compile(step), x, w)
    print(code[code.index("def call(") : code.index("return (")])
    expected = x @ w @ w
    print(f"torch {torch.__version__}: expected {expected[0].tolist()} as the first row of what the side stream computes")
    print(f"torch {torch.__version__}: got      {got[0][0].tolist()}")
    sys.exit(int(not torch.allclose(got[0], expected)))
