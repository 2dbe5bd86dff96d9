"""Two regions that a user marks for regional_inductor, by turns, end compilation with an error.

Each of the regions can be fused alone. Fused both, each would read a result of the other. Exit code 1: compilation fails.
"""

import sys
import warnings

import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx import traceback

try:
    from torch.fx.passes.regional_inductor import regional_inductor
except ImportError:  # this version compiles no regions
    sys.exit(2)


def region(name: str):
    return traceback.annotate({"compile_with_inductor": {"inductor_region": name}})


def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    with region("a"):
        left = x.sin()
    with region("b"):
        right = y.sin()
    with region("a"):
        left_next = right.cos()
    with region("b"):
        right_next = left.cos()
    return left_next, right_next


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    x, y = torch.randn(3), torch.randn(3)
    print(f"torch {torch.__version__}: expected {[one.tolist() for one in step(x, y)]}")
    try:
        with traceback.preserve_node_meta():
            made = torch.compile(step, backend=aot_autograd(fw_compiler=regional_inductor), fullgraph=True)(x, y)
    except Exception as error:
        inner = getattr(error, "inner_exception", error)
        print(f"torch {torch.__version__}: got      {type(inner).__name__}: {inner}")
        sys.exit(1)
    print(f"torch {torch.__version__}: got      {[one.tolist() for one in made]}")
    sys.exit(int(not all(torch.allclose(one, other) for one, other in zip(made, step(x, y)))))
