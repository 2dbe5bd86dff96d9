"""An op that torch.fx is told to have a side effect, and whose result nobody reads, runs in eager and not in compiled code."""

import sys
import warnings

import torch
import torch._inductor.config as config

RAN: list[float] = []


@torch.library.custom_op("shows::send", mutates_args=())
def send(x: torch.Tensor) -> torch.Tensor:
    RAN.append(float(x.sum()))
    return x.clone()


@send.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


torch.fx.node.has_side_effect(torch.ops.shows.send.default)


def step(x: torch.Tensor) -> torch.Tensor:
    torch.ops.shows.send(x + 1)
    return x * 2


def runs(function) -> int:
    RAN.clear()
    with torch.no_grad():
        function(torch.ones(2))
    return len(RAN)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with config.patch(fx_graph_cache=False):
        expected, kept, got = runs(step), runs(torch.compile(step, backend="aot_eager")), runs(torch.compile(step))
    print(f"torch {torch.__version__}: expected {expected} run, got {got}; {kept} with the same graph uncompiled")
    sys.exit(int(got != expected and kept == expected))
