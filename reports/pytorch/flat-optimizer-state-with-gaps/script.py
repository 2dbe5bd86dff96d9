"""A parameter got no gradient, so that Adam keeps nothing of it: the flattened state cannot be loaded, not even with strict=False.

One process; the model needs no wrapper. Exit code 1: the state cannot be loaded.
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)


class PartlyRead(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(2, 2, bias=False)
        self.unread = nn.Linear(2, 2, bias=False)

    def forward(self, x):
        return self.read(x)


def trained():
    model = PartlyRead()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def loaded(flat):
    options = StateDictOptions(flatten_optimizer_state_dict=flat, strict=False)
    state = get_optimizer_state_dict(*trained(), options=options)
    model = PartlyRead()
    try:
        set_optimizer_state_dict(model, torch.optim.Adam(model.parameters()), state, options=options)
    except Exception as error:  # whatever a release raises
        return f"{type(error).__name__} {error}"
    return "loaded"


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        results = {name: loaded(flat) for name, flat in {"nested": False, "flat": True}.items()}
        dist.destroy_process_group()
    for name, result in results.items():
        print(f"{name}: expected loaded, got {result}")
    print(f"torch {torch.__version__}")
    sys.exit(any(result != "loaded" for result in results.values()))
