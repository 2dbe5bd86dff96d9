"""A model that holds one module under two names: the state that get_model_state_dict returns cannot be set under DDP, nor, as full
tensors, under FSDP2.

One process. Exit code 1: a state cannot be loaded.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(x))


WRAPPERS = {
    "no wrapper": lambda model: model,
    "DDP": nn.parallel.DistributedDataParallel,
    "FSDP2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (1,))),
}


def loaded(wrapper, full):
    options = StateDictOptions(full_state_dict=full)
    state = get_model_state_dict(WRAPPERS[wrapper](Twice()), options=options)
    try:
        set_model_state_dict(WRAPPERS[wrapper](Twice()), state, options=options)
    except RuntimeError as error:
        return " ".join(str(error).split())
    return "loaded"


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        results = {(wrapper, full): loaded(wrapper, full) for wrapper in WRAPPERS for full in (False, True)}
        dist.destroy_process_group()
    for (wrapper, full), result in results.items():
        print(f"{wrapper}, full_state_dict={full}: expected loaded, got {result}")
    print(f"torch {torch.__version__}")
    sys.exit(any(result != "loaded" for result in results.values()))
