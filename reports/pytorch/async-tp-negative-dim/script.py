"""What is gathered along a dim that is counted from the end is handed to an op that counts from the front only."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
OP = torch.ops._c10d_functional


def step(x, w):
    """Gather rows along the last dim but one, and multiply."""
    parts = OP.wait_tensor(OP.all_gather_into_tensor(x, RANKS, dist.group.WORLD.group_name)).split(2)
    return torch.cat(parts, dim=-2) @ w


def compiled(*inputs):
    """The step behind the pass, as torch's own tests call it: fused ops run in their reference form."""
    import torch.distributed._symmetric_memory as symmetric
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch.fx.experimental.proxy_tensor import make_fx

    dist.is_nccl_available = lambda: True  # the pass asks for it
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(symmetric, f"_{name}"), "CPU")
    with symmetric._test_mode():
        module = make_fx(step, tracing_mode="fake")(*inputs)
        for node in module.graph.nodes:  # as `view_to_reshape` does before the passes
            if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
                node.target = torch.ops.aten.reshape.default
        micro_pipeline_tp_pass(module.graph)
        module.recompile()
        return module(*inputs)


def main(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(rank)
    inputs = [torch.randn(2, 4, 3), torch.randn(3, 5)]
    expected = step(*inputs)
    try:
        got = compiled(*inputs)
        good = got.shape == expected.shape and torch.allclose(got, expected)
        print(f"rank {rank}: expected {expected.flatten()[:4].tolist()}, got {got.flatten()[:4].tolist()}", flush=True)
    except Exception as error:
        good = False
        print(f"rank {rank}: expected a compiled step, got {type(error).__name__}: {str(error)[:200]}", flush=True)
    torch.save(good, f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
