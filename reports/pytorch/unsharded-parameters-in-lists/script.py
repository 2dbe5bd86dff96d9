"""A layer of FSDP2 that joins two parameters, compiled with its hooks: what joins them goes on reading what has been freed.

torch.compile of a `fully_shard` module with `skip_fsdp_hooks` off. Exit code 1: the compiled layer reads freed memory, which mostly
ends the process.
"""

import contextlib
import importlib
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import comms, config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

RANKS = 2
PARTS = ("_fsdp_collectives", "_fsdp_init", "_fsdp_param_group", "_fsdp_state")


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query = torch.nn.Parameter(torch.arange(16.0).view(4, 4))
        self.key = torch.nn.Parameter(torch.ones(4, 4))

    def forward(self, x):
        return x @ torch.cat([self.query, self.key]).t()


class Stream:
    """Streams of CPU, which do nothing, in a form that TorchDynamo can trace."""

    def wait_stream(self, _):
        pass

    def wait_event(self, _):
        pass

    def record_event(self, *_):
        return self

    def wait(self, *_):
        pass

    record = wait


class Device:
    def Stream(self, *_, **__):
        return STREAM

    Event = current_stream = Stream

    def stream(self, _):
        return contextlib.nullcontext()

    def __getattr__(self, name):
        return getattr(torch.cpu, name)


STREAM, DEVICE = Stream(), Device()


def main(rank, folder):
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    for name in PARTS:
        importlib.import_module(f"torch.distributed.fsdp._fully_shard.{name}")._get_device_handle = lambda _: DEVICE
    mesh = init_device_mesh("cpu", (RANKS,))
    model = torch.nn.Sequential(Layer())
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    x = torch.eye(4)
    torch._dynamo.config.skip_fsdp_hooks = False
    # FSDP2 can be traced where compiled autograd is on when it first runs.
    with torch.no_grad(), torch._dynamo.compiled_autograd._enable(lambda graph: graph):
        expected = model(x)
        print(f"rank {rank}: expected {expected[0].tolist()}", flush=True)
        try:
            with config.patch({"fx_graph_cache": False}):
                got = torch.compile(model, fullgraph=True)(x)
        except torch._dynamo.exc.Unsupported:
            print("this torch does not trace the hooks of FSDP2", flush=True)
            os._exit(2)
    print(f"rank {rank}: got {got[0].tolist()}", flush=True)
    torch.save(torch.equal(got, expected), f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    if not hasattr(comms, "remove_fsdp2_unsharded_param_graph_input_usage"):
        print("this torch has no such pass")
        sys.exit(2)
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(main, args=(folder,), nprocs=RANKS, start_method="fork")
        except mp.ProcessExitedException as error:
            if error.signal_name != "SIGSEGV":
                sys.exit(error.exit_code)
            print(f"torch {torch.__version__}: got {error}", flush=True)
            sys.exit(1)
        sys.exit(0 if all(torch.load(f"{folder}/{rank}") for rank in range(RANKS)) else 1)
