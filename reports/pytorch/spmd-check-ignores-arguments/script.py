"""torch._inductor.fx_passes.spmd_check: graphs whose collectives differ in group or reduction pass as identical."""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.fx.experimental.proxy_tensor import make_fx

c10d = torch.ops._c10d_functional
DIFFERENCES = ("reduce op", "group", "operand")


def graph(difference: str, rank: int, groups: list[str]) -> torch.fx.GraphModule:
    """Two all_reduces; rank 1 calls them with another reduction, on the groups in another order, or on other operands."""
    ops = ["sum", "max"] if difference == "reduce op" and rank else ["sum", "sum"]
    names = groups[::-1] if difference == "group" and rank else groups

    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        p, q = x.neg(), y.neg()
        if difference == "operand" and rank:
            p, q = q, p
        a, b = c10d.all_reduce(p, ops[0], names[0]), c10d.all_reduce(q, ops[1], names[1])
        return c10d.wait_tensor(a), c10d.wait_tensor(b)

    return make_fx(f, tracing_mode="fake")(torch.ones(2), torch.ones(2))


def gather(found: list, mine: int, group: dist.ProcessGroup) -> None:
    """all_gather_object for integers: torch's own needs NumPy."""
    tensors = [torch.zeros(1, dtype=torch.int64) for _ in found]
    dist.all_gather(tensors, torch.tensor([mine]), group)
    found[:] = [int(one) for one in tensors]


def run(rank: int, path: str, result: str) -> None:
    from torch._inductor.fx_passes.spmd_check import spmd_check

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.all_gather_object = gather
    groups = [dist.new_group([0, 1]).group_name for _ in range(2)]
    same = {difference: spmd_check(graph(difference, rank, groups)) for difference in DIFFERENCES}
    if rank == 0:
        for difference, verdict in same.items():
            print(f"ranks differ in {difference}: expected False, spmd_check returned {verdict}")
        if any(same.values()):
            open(result, "w").close()
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        import torch._inductor.fx_passes.spmd_check
    except ImportError:
        sys.exit(2)
    with tempfile.TemporaryDirectory() as directory:
        result = os.path.join(directory, "shown")
        mp.spawn(run, (os.path.join(directory, "store"), result), nprocs=2)
        sys.exit(1 if os.path.exists(result) else 0)
