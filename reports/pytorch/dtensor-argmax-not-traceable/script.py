"""argmax of a divided DTensor under torch.compile. Exit code 1: it fails, which it does not without."""

import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def step(x):
    return x.argmax(0).full_tensor()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    # One rank on gloo is enough: what goes wrong is decided when the graph is traced.
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    x = distribute_tensor(torch.arange(6.0).view(3, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
    try:
        expected = step(x)
    except NotImplementedError:
        print("this torch has no argmax of DTensors")
        sys.exit(2)
    try:
        got = torch.compile(step, backend="aot_eager", fullgraph=True)(x)
    except Exception as error:  # of TorchDynamo
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    dist.destroy_process_group()
    print(f"torch {torch.__version__}\nexpected {expected}\ngot      {got}")
    sys.exit(int(isinstance(got, str) or not torch.equal(expected, got)))
