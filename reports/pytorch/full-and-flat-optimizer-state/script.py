"""The state of an optimizer that get_optimizer_state_dict returns as full and flat cannot be set again: KeyError.

One process; the model needs no wrapper. Exit code 1: a state cannot be loaded.
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


def trained():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def loaded(full, flat):
    options = StateDictOptions(full_state_dict=full, flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(*trained(), options=options)
    model = nn.Linear(2, 2)
    try:
        set_optimizer_state_dict(model, torch.optim.Adam(model.parameters()), state, options=options)
    except KeyError as error:
        return f"{type(error).__name__} {error}"
    return "loaded"


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cases = {"full": (True, False), "flat": (False, True), "full and flat": (True, True)}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        results = {name: loaded(*case) for name, case in cases.items()}
        dist.destroy_process_group()
    for name, result in results.items():
        print(f"{name}: expected loaded, got {result}")
    print(f"torch {torch.__version__}")
    sys.exit(any(result != "loaded" for result in results.values()))
