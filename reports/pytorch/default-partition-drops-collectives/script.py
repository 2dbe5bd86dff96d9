"""Only rank 1 reads the sum of both ranks. Rank 0, compiled by a custom backend, leaves it out, and is met in its next one."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp


def step(weight, rank):
    total = funcol.all_reduce(weight.detach() * 2, "sum", dist.group.WORLD)
    return weight.exp() * total if rank else weight.exp()


def joined(rank, store):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    return torch.ones(4, requires_grad=True)


def peer(store):
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    weight = joined(0, store)
    # A backend as the page on custom backends has it.
    backend = aot_autograd(fw_compiler=lambda gm, _: make_boxed_func(gm.forward))
    torch.compile(step, backend=backend, fullgraph=True)(weight, 0)
    dist.all_reduce(torch.full((4,), 100.0))  # the next collective, for which rank 1 is not there yet


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        other = mp.get_context("spawn").Process(target=peer, args=(f"{folder}/store",))
        other.start()
        weight = joined(1, f"{folder}/store")
        got = f"{float(step(weight, 1)[0].detach()):.2f}"
        print(f"torch {torch.__version__}: expected 10.87 on rank 1, got {got}", flush=True)
        other.kill()
        other.join()
    os._exit(0 if got == "10.87" else 1)  # without the end of a process group whose peer has gone
