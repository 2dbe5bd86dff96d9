"""What runs in the process of one rank: serves a pool's requests, one after the other, until its parent is gone.

A fork server imports this module before it forks the ranks: importing it must start no thread and compute nothing.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import signal
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from tcverify.errors import ProgramError, UnsupportedOp
from tcverify.execution.asynchrony import Join, PendingCollective
from tcverify.execution.compare import compare_native, compare_ranks
from tcverify.execution.interpreter import RankResult, Watch, rank_inputs, run_rank
from tcverify.execution.plan import ExecutionPlan, PlanStep, check_supported, group_name, rank_constants
from tcverify.execution.process_group.messages import RankJob, Reply, decode_jobs, encode_reply
from tcverify.ops.distributed import Finish, join_group, perform, start_collective
from tcverify.registry.extensions import load_extensions_of
from tcverify.system import log_to

#: torch.distributed's own clock is put out of the way: the pool's is the only one, and it names program and ranks.
_NEVER = timedelta(days=1)

#: What ranks compute on.
DeviceType: TypeAlias = Literal["cpu", "cuda"]


def backend_of(device: DeviceType, world_size: int) -> Literal["gloo", "nccl"]:
    """The backend by which ranks meet: NCCL if each has a CUDA device of its own, since it refuses to share one; else gloo."""
    alone = device == "cuda" and dist.is_nccl_available() and torch.cuda.device_count() >= world_size
    return "nccl" if alone else "gloo"


def main(
    connection: Connection,
    rank: int,
    world_size: int,
    device: DeviceType,
    directory: str,
    core: int | None,
    extensions: Mapping[str, Any],
    rendezvous: tuple[str, int, str] | None = None,
) -> None:
    """Join the process group, say so, and serve.

    Args:
        connection: to the pool.
        device: "cpu" or "cuda".
        directory: private to the group: the rendezvous file and the ranks' logs.
        core: the CPU core to run on; None leaves it to the system.
        extensions: those of the process that owns the pool; see `extensions_here`.
        rendezvous: host, port and prefix of the store where ranks of several machines meet; None: a file in the directory.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    log_to(os.path.join(directory, f"rank{rank}.log"), nameless=False)
    try:
        load_extensions_of(extensions)
        place = _join(rank, world_size, device, directory, core, rendezvous)
    except Exception as error:  # noqa: BLE001 - whatever it is, the pool tells the user
        connection.send_bytes(json.dumps({"failed": f"{type(error).__name__}: {error}"}).encode())
        return
    connection.send_bytes(json.dumps({"ready": True, "pid": os.getpid()}).encode())
    with torch.no_grad(), contextlib.suppress(EOFError, ConnectionError):
        _serve(rank, place, connection)
    os._exit(0)  # at once: tearing the group down would wait for ranks that are gone


def _join(
    rank: int,
    world_size: int,
    device: DeviceType,
    directory: str,
    core: int | None,
    rendezvous: tuple[str, int, str] | None,
) -> torch.device:
    # Before gloo makes its threads, which inherit both. Under SCHED_BATCH a woken rank does not preempt the one that woke
    # it: with all ranks on one core, an all_reduce of four takes a tenth of the time.
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if core is not None:
        with contextlib.suppress(OSError, AttributeError):
            os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    gc.freeze()  # collections need not look at what torch has imported, again and again
    store: Any
    if rendezvous is None:
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(os.path.join(directory, "store"), world_size)  # type: ignore[attr-defined]
    else:  # the machines' owner says by which interface they reach each other
        host, port, prefix = rendezvous
        meeting = dist.TCPStore(host, port, is_master=False, wait_for_workers=False)  # type: ignore[attr-defined]
        store = dist.PrefixStore(prefix, meeting)  # type: ignore[attr-defined]
    place = torch.device("cpu")
    if device == "cuda":
        place = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(place)
    dist.init_process_group(
        backend_of(device, world_size), store=store, rank=rank, world_size=world_size, timeout=_NEVER
    )
    return place


# ------------------------------------------------------------------------------------------------------------ serving


class _CollectiveFailed(Exception):
    """torch.distributed raised, or there is no memory left: nothing can be said about the program, and the group is unusable."""


#: What torch and Python say when they get no memory: not the program's fault, which has run in lockstep by then.
_OUT_OF_MEMORY = re.compile(r"^MemoryError|^OutOfMemoryError|can't allocate memory|not enough memory")


def _serve(rank: int, place: torch.device, connection: Connection) -> None:
    backlog: deque[dict[str, Any]] = deque()
    while True:
        request = backlog.popleft() if backlog else json.loads(connection.recv_bytes())
        reply = _answer(rank, place, request)
        for message in encode_reply(reply, values=len(request["jobs"]) == 1):
            connection.send_bytes(message)
        if reply.failure is not None:
            while True:  # until killed: what the other ranks do is undefined
                connection.recv_bytes()
        if reply.held:
            # Other ranks may still wait in this program for collectives that this rank skipped. Entering those of the
            # next program would answer them, so wait until the pool knows that everybody has come through.
            while (message := json.loads(connection.recv_bytes())).get("go") != request["id"]:
                backlog.append(message)


def _answer(rank: int, place: torch.device, request: dict[str, Any]) -> Reply:
    reply = Reply(request["id"])
    under_way: dict[PendingCollective, Finish] = {}
    try:
        for job in decode_jobs(request["jobs"]):
            result = reply.results[-1] if job is None else _run(job, rank, place, request["observe"], under_way)
            if result.error is not None and _OUT_OF_MEMORY.search(result.error.message):
                raise _CollectiveFailed(f"node '{result.error.node}' is out of memory: {result.error.message}")
            reply.results.append(result)
            if result.error is not None:
                reply.left = bool(under_way)
                return reply
        if len(reply.results) == 2:
            reply.deltas = compare_ranks(*reply.results)
        elif len(reply.results) == 3:
            reply.deltas = compare_native(*reply.results)
    except (UnsupportedOp, ProgramError) as error:
        reply.refusal, reply.left = error, bool(under_way)
    except Exception as error:  # noqa: BLE001 - a reply that never comes would say less than any error
        reply.failure = str(error) if isinstance(error, _CollectiveFailed) else f"{type(error).__name__}: {error}"
    return reply


def _run(
    job: RankJob, rank: int, place: torch.device, observe: bool, under_way: dict[PendingCollective, Finish]
) -> RankResult:
    """Run a program. Collectives left in `under_way` were not waited for: the rank raised, and its peers may not join them."""
    check_supported(job.plans, job.domain)  # those of all ranks, so that every rank refuses and none waits for another
    binding = job.ranks[rank]
    plan = job.plans[binding.graph]
    inputs = [value.to(place) for value in rank_inputs(plan, rank, job.sources, job.domain)]
    constants = rank_constants(job.sources.mesh, rank, binding.constants)
    for name in _asynchronous_groups(job.plans):
        join_group(job.sources.mesh.dim(name).group(rank), name, place)
    # A real collective reads here where it starts, and writes at the wait.
    generator = run_rank(
        plan, rank, constants, inputs, observe=observe, domain=job.domain, timing="apart",
        watch=None if place.type == "cpu" else _placing(place),
    )  # fmt: skip
    placed: AbstractContextManager[Any] = nullcontext() if place.type == "cpu" else place
    answer: Any = None
    while True:
        try:
            with placed, job.domain.running():
                node, event = generator.send(answer)
        except StopIteration as stop:
            result: RankResult = stop.value
            break
        answer = None
        try:
            if isinstance(event, Join):
                for one in event.under_way:
                    one.write(job.domain.settle(under_way.pop(one)()))
            elif isinstance(event, PendingCollective):
                under_way[event] = start_collective(event.collective, event.tensor, job.domain.running)
            else:
                answer = job.domain.settle(perform(event.collective, event.tensor, job.domain.running))
        except Exception as error:  # gloo and nccl raise plain RuntimeErrors
            raise _failed("the wait" if isinstance(event, Join) else str(event.collective), node, error) from error
    while (
        result.error is None and under_way
    ):  # no rank waits for these, but the group must be idle before the next program
        one, finish = under_way.popitem()
        try:
            finish()
        except Exception as error:
            raise _failed(str(one.collective), one.node, error) from error
    return result


def _placing(place: torch.device) -> Watch:
    """Bring to the device what a graph holds itself, or makes of nothing."""

    def placed(step: PlanStep, args: list[Any], kwargs: dict[str, Any], value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(place), value)

    return placed


def _asynchronous_groups(plans: list[ExecutionPlan]) -> list[str]:
    """Names of the groups on which some rank starts collectives, in one order on all ranks.

    Their process groups are made before the program runs. Making one waits for its members, where a start does not wait: ranks
    that start on several groups in different orders would wait for each other.
    """
    starts = [step for plan in plans for step in plan.steps if step.op.phase == "start"]
    arguments = [argument for step in starts for argument in (*step.args, *step.kwargs.values())]
    return sorted({name for name in map(group_name, arguments) if name is not None})


def _failed(what: str, node: str, error: Exception) -> _CollectiveFailed:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return _CollectiveFailed(f"{what} of node '{node}' failed: {lines[0]}")
