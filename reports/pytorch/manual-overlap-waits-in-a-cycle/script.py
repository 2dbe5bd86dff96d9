"""A gradient is scattered over one group and then over another. The first wait is to follow the start that needs its result."""

import contextlib
import io
import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

try:
    from torch._inductor.fx_passes.overlap_manual_scheduling import manual_overlap_bucketing
except ImportError:
    sys.exit(2)


def step(gradient: torch.Tensor) -> torch.Tensor:
    for group in GROUPS:  # as DTensor redistributes a gradient that is partial over two dims of a mesh
        started = torch.ops._c10d_functional.reduce_scatter_tensor(gradient, "sum", 1, group)
        gradient = torch.ops._c10d_functional.wait_tensor(started)
    return gradient


def compiler(gm: torch.fx.GraphModule, _: object) -> object:
    """A backend that overlaps reduce_scatters of one module, and runs the graph."""
    manual_overlap_bucketing(
        gm, ["module"], insert_overlap_deps=True, module_stack_fn=lambda node: [("module", torch.nn.Module)]
    )
    gm.recompile()
    return make_boxed_func(gm.forward)


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        GROUPS = [dist.new_group([0]).group_name for _ in range(2)]
        gradient = torch.ones(2, 2)
        expected = step(gradient)
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # FX prints the exception, too
                got = torch.compile(step, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(gradient)
        except Exception as error:  # TorchDynamo wraps what a backend raises
            if "not associated with a value" not in str(error):
                raise
            got = " ".join(str(error).split())[:120]
        said = "the same" if not isinstance(got, str) else got
        print(f"torch {torch.__version__}: expected {expected.tolist()}, got {said}")
        dist.destroy_process_group()
    sys.exit(int(isinstance(got, str)))
