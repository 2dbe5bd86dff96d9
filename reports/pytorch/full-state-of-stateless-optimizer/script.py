"""Loading the full state of an optimizer that keeps nothing, such as SGD, raises AssertionError.

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

KINDS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.5),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=0.5, momentum=0.25),
}


def trained(kind):
    model = nn.Linear(2, 2)
    optimizer = KINDS[kind](model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def loaded(kind):
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(*trained(kind), options=options)
    model = nn.Linear(2, 2)
    try:
        set_optimizer_state_dict(model, KINDS[kind](model.parameters()), state, options=options)
    except AssertionError as error:
        return f"{type(error).__name__} {error}".strip()
    return "loaded"


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        results = {kind: loaded(kind) for kind in KINDS}
        dist.destroy_process_group()
    for kind, result in results.items():
        print(f"{kind}: expected loaded, got {result}")
    print(f"torch {torch.__version__}")
    sys.exit(any(result != "loaded" for result in results.values()))
