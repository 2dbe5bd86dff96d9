"""Two gradients are scattered by one collective. Manual overlap asks what reads the wait for its group, and fails."""

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


def step(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
    started = torch.ops._c10d_functional.reduce_scatter_tensor_coalesced([one, other], "sum", 1, "0")
    return tuple(map(torch.ops._c10d_functional.wait_tensor, started))


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
        given = torch.ones(2, 2), torch.ones(3)
        expected = [one.tolist() for one in step(*given)]
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # FX prints the exception, too
                made = torch.compile(step, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)(*given)
            got = [one.tolist() for one in made]
        except Exception as error:  # TorchDynamo wraps what a backend raises
            if "AssertionError" not in str(error):
                raise
            got = " ".join(f"{type(error).__name__}: {error}".split())[:120]
        print(f"torch {torch.__version__}: expected {expected}, got {got}")
        dist.destroy_process_group()
    sys.exit(int(got != expected))
