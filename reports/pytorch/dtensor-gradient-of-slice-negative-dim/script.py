import datetime
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

WORLD = 2
os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def case(mesh, rank):
    x = torch.arange(8.0).reshape(2, 4)
    divided = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    whole = x.clone().requires_grad_()
    grad = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    whole.narrow(-1, 0, 3).backward(grad)
    divided.narrow(-1, 0, 3).backward(distribute_tensor(grad, mesh, [Shard(1)]))
    return whole.grad.tolist(), divided.grad.full_tensor().tolist()


def run(rank: int, store: str, answers: mp.Queue) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD, timeout=datetime.timedelta(seconds=20)
    )
    try:
        expected, got = case(init_device_mesh("cpu", (WORLD,)), rank)
        answers.put((rank, "value", str(expected), str(got)))
    except NotImplementedError as error:
        answers.put((rank, "absent", "", str(error)[:200]))
    except Exception as error:
        answers.put((rank, "raised", "no error", f"{type(error).__name__}: {str(error)[:200]}"))
    answers.close()
    answers.join_thread()
    os._exit(0)  # a peer may be stuck in a collective: do not wait for it


if __name__ == "__main__":
    context = mp.get_context("fork")
    with tempfile.TemporaryDirectory() as place:
        answers = context.Queue()
        ranks = [context.Process(target=run, args=(rank, f"{place}/store", answers)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        found = [answers.get(timeout=55) for _ in ranks]
    for rank, how, expected, got in sorted(found):
        print(f"rank {rank}: expected {expected}, got {got}")
    if any(how == "absent" for _, how, _, _ in found):
        sys.exit(2)
    sys.exit(int(any(expected != got for _, _, expected, got in found)))
