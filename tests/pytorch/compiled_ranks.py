"""Runs what Inductor made of programs on threads and on gloo, with completion chosen, and prints what it gives.

A process of its own, since modules are called on process groups of its own. It compiles the graphs of all ranks, in turn, with
groups that move nothing; forks ranks that run the modules on gloo; and runs the same modules on the threaded process group.
It reads cases as JSON, `[{"name": …, "program": …, "plant": …}, …]` (without a program: the function `layer`, on "ranks" ranks),
and writes one line of JSON: by "case how when" the outputs of each rank, flat.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils import _pytree as pytree

from tcverify.domains import NATIVE
from tcverify.program import Mesh, Program, loads
from tcverify.pytorch.adversary import Completion
from tcverify.pytorch.compiling import compile_graph, example_inputs, inductor
from tcverify.pytorch.functional import functional_copy
from tcverify.pytorch.groups import fake_groups, groups_of

#: "plain": without a choice, as gloo or threads do it. What nobody waits for would still be under way in the next case on gloo.
WHENS = ("plain", "early", "late", "apart")

SECONDS = 40

Call = Callable[[], Any]


@contextlib.contextmanager
def planted(defect: str | None) -> Iterator[None]:
    """Let Inductor have a defect while it compiles."""
    from torch._inductor import ir

    with contextlib.ExitStack() as stack:
        if defect == "no wait":
            stack.enter_context(mock.patch.object(ir._WaitKernel, "create_wait", return_value=None))
        if defect == "operand reused":
            stack.enter_context(mock.patch.object(ir._WaitKernel, "get_volatile_reads", return_value=[]))
        yield


def compiled_ranks(program: Program, defect: str | None) -> list[Any]:
    """What Inductor makes of the graph of each rank: takes a rank's inputs one by one."""
    modules = []
    for rank in range(program.world_size):
        gm = program.graph_module(rank)
        with groups_of(gm), planted(defect), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            modules.append(compile_graph(functional_copy(gm), example_inputs(gm)))
    return modules


def of_program(program: Program, modules: list[Any]) -> list[Call]:
    """Calls of the modules of all ranks with the inputs of the program; they give also what inputs hold at the end."""

    def call(rank: int) -> Any:
        names = [node.target for node in program.graph_module(rank).graph.nodes if node.op == "placeholder"]
        specs = program.sources.chosen(names, rank)
        inputs = [spec.values(program.mesh, rank, program.seed, NATIVE) for spec in specs]
        return [pytree.tree_leaves(modules[rank](*inputs)), inputs]

    return [partial(call, rank) for rank in range(program.world_size)]


def layer(x: torch.Tensor) -> torch.Tensor:
    """What a user writes: the operand of the first collective is used up before its wait."""
    gathered = functional.all_gather_tensor(torch.relu(x), 0, "tp")
    total = functional.all_reduce(x * 2, "sum", "tp")
    return torch.cat([functional.wait_tensor(gathered) + 1, functional.wait_tensor(total)])


def of_function(world_size: int, defect: str | None) -> list[Call]:
    """Calls of one function on all ranks, which torch.compile has compiled once, whole."""
    # Code of its own: torch keeps what it compiled by code, and would take it for the other defect too.
    copy = FunctionType(layer.__code__.replace(co_name=f"layer_{world_size}"), layer.__globals__)
    compiled = torch.compile(copy, fullgraph=True, dynamic=False)
    with fake_groups(0, world_size, {"tp": tuple(range(world_size))}), planted(defect):
        compiled(torch.zeros(2, 3))
    return [lambda rank=rank: compiled(torch.arange(6.0).reshape(2, 3) - 2 + rank) for rank in range(world_size)]  # type: ignore[misc]


def given(call: Call, when: str) -> list[Any]:
    """What a call gives, flat; or why it gives nothing."""
    try:
        with torch.no_grad(), torch.compiler.set_stance("fail_on_recompile"):
            with Completion(when) if when != "plain" else contextlib.nullcontext():  # type: ignore[arg-type]
                result = call()
            return [one.double().flatten().tolist() for one in pytree.tree_leaves(result)]
    except Exception:  # noqa: BLE001 - the test shows it
        return [traceback.format_exc()[-1500:]]


def join(rank: int, mesh: Mesh, backend: str, store: Any) -> None:
    """Be a rank of a mesh, whose groups have the names that graphs call them by."""
    dist.init_process_group(
        backend, rank=rank, world_size=mesh.world_size, store=store, timeout=timedelta(seconds=SECONDS)
    )
    for dim in mesh.dims:
        torch._C._distributed_c10d._register_process_group(dim.name, dist.group.WORLD)


def on_threads(mesh: Mesh, calls: list[Call], when: str) -> list[Any]:
    """Run all ranks as threads."""
    results: list[Any] = [None] * mesh.world_size
    threaded.ProcessLocalGroup.reset()
    store = dist.HashStore()

    def run(rank: int) -> None:
        join(rank, mesh, "threaded", store)
        results[rank] = given(calls[rank], when)

    ranks = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(mesh.world_size)]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(SECONDS)
    return results


def on_gloo(mesh: Mesh, cases: dict[str, list[Call]], sound: set[str], found: dict[str, list[Any]]) -> None:
    """Run all cases of a mesh on processes, one after the other."""
    with tempfile.TemporaryDirectory() as place:
        children = []
        for rank in range(mesh.world_size):
            child = os.fork()
            if child:
                children.append(child)
                continue
            try:  # a rank: nothing of the parent runs in it any further
                join(rank, mesh, "gloo", dist.FileStore(f"{place}/store", mesh.world_size))
                got = {
                    f"{name} gloo {when}": given(calls[rank], when)
                    for name, calls in cases.items()
                    for when in (WHENS if name in sound else WHENS[1:])
                }
                Path(place, str(rank)).write_text(json.dumps(got))
                dist.barrier()
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(0)
        for child in children:
            os.waitpid(child, 0)
        for rank in range(mesh.world_size):
            path = Path(place, str(rank))
            for name, value in (json.loads(path.read_text()) if path.is_file() else {}).items():
                found.setdefault(name, [None] * mesh.world_size)[rank] = value


def main() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    cases_given = json.load(sys.stdin)
    sound = {case["name"] for case in cases_given if case["plant"] is None}
    by_mesh: dict[Mesh, dict[str, list[Call]]] = {}
    found: dict[str, list[Any]] = {}
    with inductor({}):
        for case in cases_given:
            if "program" in case:
                program = loads(json.dumps(case["program"]))
                mesh, calls = program.mesh, of_program(program, compiled_ranks(program, case["plant"]))
            else:
                mesh, calls = Mesh.grid({"tp": case["ranks"]}), of_function(case["ranks"], case["plant"])
            by_mesh.setdefault(mesh, {})[case["name"]] = calls
        for mesh, cases in by_mesh.items():
            on_gloo(mesh, cases, sound, found)  # before there are threads
        threaded._install_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        for mesh, cases in by_mesh.items():
            for name, calls in cases.items():
                for when in WHENS:
                    found[f"{name} threads {when}"] = on_threads(mesh, calls, when)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
