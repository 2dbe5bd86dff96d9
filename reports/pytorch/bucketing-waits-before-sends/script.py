"""Two all_reduces, and a message between them. Once the all_reduces are one, rank 0 waits for it before it sends."""

import datetime
import os
import sys
import tempfile

import torch
import torch._inductor.config as config
import torch.distributed as dist
import torch.multiprocessing as mp

c10d = torch.ops._c10d_functional


@torch.library.custom_op("demo::send", mutates_args=())
def send(x: torch.Tensor, peer: int) -> None:
    dist.send(x, peer)


@torch.library.custom_op("demo::recv", mutates_args=())
def recv(like: torch.Tensor, peer: int) -> torch.Tensor:
    result = torch.empty_like(like)
    dist.recv(result, peer)
    return result


send.register_fake(lambda x, peer: None)
recv.register_fake(lambda like, peer: torch.empty_like(like))
torch.fx.node.has_side_effect(torch.ops.demo.send.default)
torch.fx.node.has_side_effect(torch.ops.demo.recv.default)


def step(x: torch.Tensor, y: torch.Tensor, rank: int, group: str) -> tuple[torch.Tensor, ...]:
    first = c10d.wait_tensor(c10d.all_reduce(x, "sum", group))
    message = x
    if rank == 1:
        message = torch.ops.demo.recv(x, 0)
        y = y + message
    second = c10d.all_reduce(y, "sum", group)  # on rank 0 it runs while that sends
    if rank == 0:
        torch.ops.demo.send(x, 1)
    return first, c10d.wait_tensor(second), message


def main(rank: int, store: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = datetime.timedelta(seconds=15)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    group = dist.group.WORLD.group_name
    x, y = torch.full((4,), 1.0), torch.full((4,), 100.0)
    expected = [float(one[0]) for one in step(x, y, rank, group)]
    settings = {"bucket_all_reduces_fx": "all", "fx_graph_cache": False, "compile_threads": 1}
    with config.patch(settings):
        compiled = torch.compile(step, fullgraph=True)
        dist.barrier()
        try:
            got = str([float(one[0]) for one in compiled(x, y, rank, group)])
        except RuntimeError as error:
            if "imed out" not in str(error) and "closed by peer" not in str(error):
                raise
            got = "a time-out"
    print(f"torch {torch.__version__}, rank {rank}: expected {expected}, got {got}", flush=True)
    os._exit(int(str(expected) != got))


if __name__ == "__main__":
    if not hasattr(config, "bucket_all_reduces_fx"):
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.start_processes(main, args=(f"{folder}/store",), nprocs=2, start_method="spawn", join=False)
        for process in ranks.processes:
            process.join()
        sys.exit(max(process.exitcode for process in ranks.processes))
