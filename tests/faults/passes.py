"""Passes that do what no pass should, beside their graph or in place of their work."""

from __future__ import annotations

import os
import random
import sys
import time

import torch
import torch.distributed as dist
from torch import fx

#: What `leaks` and `fills_memory` keep.
KEPT: list[bytearray] = []


def _reductions(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if "all_reduce" in str(node.target)]


def does_nothing(gm: fx.GraphModule) -> None:
    pass


def recurses(gm: fx.GraphModule) -> None:
    if _reductions(gm):
        recurses(gm)


def recurses_in_c(gm: fx.GraphModule) -> None:
    """Nests a value so deeply that what frees or shows it runs out of stack."""
    sys.setrecursionlimit(1 << 30)
    value: list[object] = []
    for _ in range(1_000_000):
        value = [value]
    repr(value)


def holds_the_interpreter(gm: fx.GraphModule) -> None:
    """Spends ages in one call that lets no other thread run."""
    with open("running", "a") as file:
        file.write("again ")
    sum(range(10**18))


def forks_and_stays(gm: fx.GraphModule) -> None:
    """Leaves a process behind that does not end, and ends its own."""
    child = os.fork()
    if child == 0:
        time.sleep(3600)
    with open("forked", "a") as file:
        file.write(f"{child} ")
    os._exit(3)


def closes_its_files(gm: fx.GraphModule) -> None:
    os.closerange(3, 1024)


def fills_memory(gm: fx.GraphModule) -> None:
    while _reductions(gm):
        KEPT.append(bytearray(64 << 20))


def leaks(gm: fx.GraphModule) -> None:
    KEPT.append(bytearray(48 << 20))


# ---------------------------------------------------------------------------------------------------- torch's global state


def sets_dtype(gm: fx.GraphModule) -> None:
    torch.set_default_dtype(torch.float16)


def sets_device(gm: fx.GraphModule) -> None:
    torch.set_default_device("meta")


def sets_grad_mode(gm: fx.GraphModule) -> None:
    torch.set_grad_enabled(False)


def sets_threads(gm: fx.GraphModule) -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


def sets_determinism(gm: fx.GraphModule) -> None:
    torch.use_deterministic_algorithms(True)


def sets_autocast(gm: fx.GraphModule) -> None:
    torch.set_autocast_enabled("cpu", True)


def sets_anomaly_detection(gm: fx.GraphModule) -> None:
    torch.autograd.set_detect_anomaly(True)


def seeds_torch(gm: fx.GraphModule) -> None:
    torch.manual_seed(torch.initial_seed() + 1)


def seeds_python(gm: fx.GraphModule) -> None:
    random.seed(1)


def runs_dynamo(gm: fx.GraphModule) -> None:
    torch.compile(torch.neg, backend="eager")(torch.ones(2))


def enters_a_mode(gm: fx.GraphModule) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    FakeTensorMode().__enter__()


def patches_torch(gm: fx.GraphModule) -> None:
    torch.relu = torch.abs  # type: ignore[assignment]


def patches_fx(gm: fx.GraphModule) -> None:
    fx.Graph.lint = lambda self: None  # type: ignore[method-assign]


def closes_the_group(gm: fx.GraphModule) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def draws_numbers(gm: fx.GraphModule) -> None:
    """As making a module with weights does."""
    torch.rand(1000)
    for _ in range(10_000):
        random.random()


def sets_and_restores(gm: fx.GraphModule) -> None:
    """As a pass does that runs something of its own."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        torch.rand(3)


def says_much(gm: fx.GraphModule) -> None:
    """Writes more to standard output and error than a buffer holds."""
    for stream in (sys.stdout, sys.stderr):
        print("x" * 100_000, file=stream, flush=True)
