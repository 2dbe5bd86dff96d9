"""Two waits for one all_reduce, the first of which is read last. Exit code 1: Inductor's passes fail on the graph."""

import sys
import warnings

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode
from torch._functorch.aot_autograd import make_boxed_func
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

c10d = torch.ops._c10d_functional


def inductor_passes(gm, inputs):
    """Inductor's passes on the graph of AOTAutograd, and no code generation."""
    with V.set_fake_mode(detect_fake_mode(inputs)):
        post_grad_passes(gm, is_inference=True)
    gm.recompile()
    return make_boxed_func(gm.forward)


def step(x):
    total = c10d.all_reduce(x, "sum", dist.group.WORLD.group_name)
    first = c10d.wait_tensor(total)
    second = c10d.wait_tensor(total)
    return (second + 1).relu(), first * 2


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    x = torch.arange(4.0)
    expected = step(x)
    try:
        got = torch.compile(step, backend=aot_autograd(fw_compiler=inductor_passes), fullgraph=True)(x)
    except RuntimeError as error:  # so does plain torch.compile
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    dist.destroy_process_group()
    print(f"torch {torch.__version__}\nexpected {expected}\ngot      {got}")
    sys.exit(int(isinstance(got, str) or not all(map(torch.equal, expected, got))))
