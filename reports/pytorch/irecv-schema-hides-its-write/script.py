"""Rank 1 receives two messages from rank 0 into two buffers. Compiled, it gets one of them twice."""

import os
import sys
import tempfile
import time

import torch
import torch._dynamo.config
import torch.distributed as dist
import torch.multiprocessing as mp


def receive(weight):
    first, second = torch.zeros(4), torch.zeros(4)
    dist.irecv(first, 0).wait()
    dist.irecv(second, 0).wait()
    return weight * first, weight * second


def join(rank, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def peer(store):
    join(0, store)
    sent = [dist.isend(torch.full((4,), value), 1) for value in (1.0, 2.0)]
    time.sleep(60 if sent else 0)  # until it is ended: rank 1 may still receive


if __name__ == "__main__":
    if not hasattr(torch._dynamo.config, "enable_p2p_compilation"):
        print(f"torch {torch.__version__} does not compile irecv")
        sys.exit(2)
    torch._dynamo.config.enable_p2p_compilation = True
    with tempfile.TemporaryDirectory() as folder:
        other = mp.get_context("spawn").Process(target=peer, args=(f"{folder}/store",))
        other.start()
        join(1, f"{folder}/store")
        # The default backend uses the same partitioner as aot_eager; this one needs no C++ compiler.
        compiled = torch.compile(receive, backend="aot_eager", fullgraph=True)
        got = [float(one[0].detach()) for one in compiled(torch.ones(4, requires_grad=True))]
        print(f"torch {torch.__version__}: expected [1.0, 2.0], got {got}", flush=True)
        other.kill()
        other.join()
    os._exit(0 if got == [1.0, 2.0] else 1)  # without the end of a process group whose peer has gone
