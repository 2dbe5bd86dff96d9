"""An op with an ordered effect and no result runs in eager, and is gone from what TorchDynamo and AOTAutograd hand to any backend.

One process; no C++ is compiled.
"""

import sys
import warnings

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

RAN: list[str] = []

LIBRARY = torch.library.Library("shows", "DEF")
LIBRARY.define("barrier(str group) -> ()")
LIBRARY.impl("barrier", RAN.append, "CompositeExplicitAutograd")
torch.library.register_fake("shows::barrier", lambda group: None)
_register_effectful_op(torch.ops.shows.barrier.default, _EffectType.ORDERED)


def step(gradient: torch.Tensor) -> torch.Tensor:
    reduced = gradient.sum(0)
    torch.ops.shows.barrier("world")
    return reduced


def ran(function) -> list[str]:
    RAN.clear()
    function(torch.ones(3, 4))
    return list(RAN)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    expected, got = ran(step), ran(torch.compile(step, fullgraph=True, backend="aot_eager_decomp_partition"))
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(got != expected))
