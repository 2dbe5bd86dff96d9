"""Each rank adds its loss to the sum that one of them logs. Where nobody reads the sum, torch.compile raises."""

import os
import sys

import torch
import torch.distributed as dist

torch._dynamo.config.optimize_ddp = "python_reducer"

model = torch.nn.Linear(4, 4)


def step(x: torch.Tensor, logs: bool) -> torch.Tensor:
    loss = model(x).square().mean()
    total = loss.detach().clone()
    dist.all_reduce(total)  # all ranks take part; the result matters to the one that logs
    return total if logs else loss


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # One rank on gloo is enough: what goes wrong is decided when the graph is compiled.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    torch.nn.parallel.DistributedDataParallel(model)  # sets torch._inductor.config._fuse_ddp_communication
    if not torch._inductor.config._fuse_ddp_communication:
        sys.exit(2)
    x = torch.ones(2, 4)
    bad = False
    for logs in (True, False):
        with torch.no_grad():
            expected = round(step(x, logs).item(), 5)
            try:
                got = round(torch.compile(step, fullgraph=True)(x, logs).item(), 5)
            except Exception as error:  # Inductor wraps what a pass raises
                if "zero outputs/users" not in str(error):
                    raise
                got, bad = " ".join(str(error).split())[:60], True
        print(f"torch {torch.__version__}, rank that {'logs' if logs else 'does not log'}: expected {expected}, got {got}", flush=True)
    dist.destroy_process_group()
    os._exit(int(bad))  # processes of the compiler can hold up the end
