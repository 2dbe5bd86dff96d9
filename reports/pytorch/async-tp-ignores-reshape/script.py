"""A product is reshaped before it is reduced and scattered; the fused op knows nothing of the new shape."""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc


def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    made = (x.reshape(8, 3) @ w).reshape(4, 2, 5)  # x is [2, 4, 3]
    return fc.wait_tensor(fc.reduce_scatter_tensor(made, "sum", 0, dist.group.WORLD))


def run() -> tuple[list[int], list[int]]:
    import torch.distributed._symmetric_memory as symmetric
    from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    from torch.fx.experimental.proxy_tensor import make_fx

    x, w = torch.arange(24.0).reshape(2, 4, 3), torch.arange(15.0).reshape(3, 5)
    dist.is_nccl_available = lambda: True  # the pass asks for it; its op runs in its reference form here
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter, "CPU")
    with symmetric._test_mode():
        module = make_fx(product, tracing_mode="fake")(x, w)
        for node in module.graph.nodes:  # as `view_to_reshape` does before the passes
            if node.target in (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default):
                node.target = torch.ops.aten.reshape.default
        micro_pipeline_tp_pass(module.graph)
        module.recompile()
        return list(product(x, w).shape), list(module(x, w).shape)


if __name__ == "__main__":
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    expected, got = run()
    dist.destroy_process_group()
    print(f"torch {torch.__version__}: expected {expected}, got {got}")
    sys.exit(int(expected != got))
