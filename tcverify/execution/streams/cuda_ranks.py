"""Explores the streams of a lowered program on CUDA devices: one rank in this process, several in one process each.

Several ranks use NCCL if each has a separate device; its collectives run on the stream that calls them. Otherwise, since
NCCL refuses two ranks on one device, they share devices and use gloo, staged through the host: the host waits until the operand
is on the CPU, so until the calling stream, and whatever it waits for, has reached that point, and continues to issue ops
once the result has arrived. That hides races between ops before a collective and ops issued after it.

None of this has been run on CUDA yet. The processes have, with queues in place of a device (see `simulated`).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from tcverify.errors import ExecutorError
from tcverify.execution.compare import compare_ranks
from tcverify.execution.executor import Run
from tcverify.execution.interpreter import RankResult
from tcverify.execution.plan import first_line, plans_of
from tcverify.execution.process_group.messages import Reply, decode_reply, encode_reply
from tcverify.execution.process_group.worker import DeviceType
from tcverify.execution.streams.cuda_streams import CudaDevice, Device, run_orders
from tcverify.execution.streams.exploration import MOST_OPS, StreamOrder
from tcverify.execution.streams.issue import is_lowered, issue
from tcverify.execution.streams.observations import OrderObservation
from tcverify.execution.streams.simulated import QueuedDevice
from tcverify.ops import Collective
from tcverify.ops.distributed import perform
from tcverify.program import Contract, NotSerialisable, Program
from tcverify.program.codec import dumps, loads
from tcverify.program.contract import Boundary, InputsReady
from tcverify.program.stream_options import MAIN_STREAM
from tcverify.registry.extensions import extensions_here, load_extensions_of
from tcverify.system import end_process, scratch, start_process

#: How far outputs may differ, relative to their scale. Reading too early gives NaN or the values of another op.
TOLERANCE = 2.0**-30
#: Seconds until all ranks have run all orders.
TIMEOUT_S = 300.0


def explore_on_cuda(
    program: Program,
    reference: Run | None = None,
    seeds: Sequence[int] = (0,),
    *,
    boundary: Boundary = "strict",
    inputs: InputsReady = "ready",
) -> list[OrderObservation]:
    """Run a lowered program on real CUDA streams, each stream delayed in turn, then ops drawn at random.

    Not run on a GPU yet.

    Args:
        reference: the program's run in lockstep, by default that of the issue order.
        seeds: of the random draws.
        boundary, inputs: as in `Contract`.

    Returns:
        Outputs that were wrong, each once; none for a program that is not lowered, does not run to its end, or is too large.

    Raises:
        ExecutorError: there is no CUDA device, a rank fails or hangs, or the program cannot be sent to ranks.
        UnsupportedOp: an op has no meaning.
    """
    if not torch.cuda.is_available():
        raise ExecutorError("there is no CUDA device", "explore the streams in lockstep, which needs no device")
    Contract(boundary=boundary, inputs=inputs)  # refuses other words
    if not any(map(is_lowered, plans_of(program))):
        return []
    issued, run = issue(program, boundary, inputs)
    if not issued or sum(len(one.ops) for one in issued) > MOST_OPS:
        return []
    used = sorted({op.stream for one in issued for op in one.ops})
    orders = [*(StreamOrder("starve", stream=s) for s in used), *(StreamOrder("random", seed) for seed in seeds)]
    if program.world_size > 1:
        results = run_ranks(program, orders, boundary, inputs, TIMEOUT_S)
    else:
        try:
            results = [run_orders(issued[0], CudaDevice(), perform, orders)]
        except RuntimeError as error:  # what CUDA raises, when an op fails that was launched before, or memory is short
            raise ExecutorError(f"the CUDA device fails: {first_line(error)}") from error
    reference = run if reference is None or not reference.finished else reference
    return list(compare_orders(reference, results, orders))


def compare_orders(
    reference: Run, results: Sequence[Sequence[RankResult]], orders: Sequence[StreamOrder]
) -> Iterator[OrderObservation]:
    """Say which outputs differ from lockstep's and from those in one stream, each in the first order that shows it.

    Args:
        results: per rank, as `run_orders` returns them.
    """
    for expected, (alone, *others) in zip(reference.ranks, results, strict=True):
        known: set[str] = set()
        for order, found in zip([StreamOrder("issue"), *orders], others, strict=True):
            for label in _wrong(expected, found) & _wrong(alone, found) - known:
                known.add(label)
                text = f"{label} on CUDA streams differs from what it is in lockstep, and in one stream of the device"
                name = f"{order}, on CUDA"
                yield OrderObservation("output", expected.rank, "output", MAIN_STREAM, "", text, name, ())


def _wrong(expected: RankResult, found: RankResult) -> set[str]:
    deltas = (delta for delta in compare_ranks(expected, found) if not delta.alias)  # outputs are copies here
    return {d.label for d in deltas if d.problem or d.overflow or d.difference > TOLERANCE * d.scale}


# ------------------------------------------------------------------------------------------------------ several ranks


def backend_of(world_size: int) -> str:
    """The backend for this many ranks on this machine: "nccl" if each has a separate device, else "gloo"."""
    return "nccl" if dist.is_nccl_available() and torch.cuda.device_count() >= world_size else "gloo"


def run_through_host(call: Collective, tensor: torch.Tensor) -> torch.Tensor:
    """Carry out a collective of tensors on a device through the host. Gloo knows few collectives of CUDA tensors."""
    return perform(call, tensor.cpu()).to(tensor.device)


def run_ranks(
    program: Program,
    orders: Sequence[StreamOrder],
    boundary: Boundary,
    inputs: InputsReady,
    timeout: float,
    device: DeviceType = "cuda",
) -> list[list[RankResult]]:
    """Run `run_orders` in one process per rank. Raises ExecutorError as `explore_on_cuda` does.

    Args:
        device: "cuda", or "cpu" for queues in the place of a device.
    """
    try:
        text = dumps(program)
    except NotSerialisable as error:
        raise ExecutorError(f"the program cannot be sent to the processes of its ranks: {error.message}") from None
    world_size = program.world_size
    backend = backend_of(world_size) if device == "cuda" else "gloo"
    where = f"{backend} on {device} streams"
    results: dict[int, list[RankResult]] = {}
    directory = scratch.new_directory("group")
    started = []
    try:
        for rank in range(world_size):
            task = (text, boundary, inputs, tuple(orders), extensions_here())
            arguments = (rank, world_size, device, backend, directory, *task)
            started.append(start_process(serve_rank, arguments, name=f"cuda-rank{rank}"))
        deadline = time.monotonic() + timeout
        waiting = {connection: rank for rank, (_, connection) in enumerate(started)}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                silent = f"ranks {sorted(waiting.values())} had not answered after {timeout:g} s"
                raise ExecutorError(f"{where}: {silent}")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                results[rank] = _receive(connection, rank, where)
    finally:
        for process, connection in started:
            end_process(process)
            connection.close()
        shutil.rmtree(directory, ignore_errors=True)
    return [results[rank] for rank in range(world_size)]


def _receive(connection: Connection, rank: int, where: str) -> list[RankResult]:
    try:
        data: dict[str, Any] = json.loads(connection.recv_bytes())
        reply = decode_reply(rank, data, connection.recv_bytes())
    except (EOFError, OSError):
        raise ExecutorError(f"{where}: rank {rank} ended before it had answered") from None
    if reply.failure is not None:
        raise ExecutorError(f"{where}: on rank {rank}, {reply.failure}")
    return reply.results


def serve_rank(
    connection: Connection,
    rank: int,
    world_size: int,
    device: DeviceType,
    backend: str,
    directory: str,
    text: str,
    boundary: Boundary,
    inputs: InputsReady,
    orders: Sequence[StreamOrder],
    extensions: Mapping[str, Any],
) -> None:
    """Be one rank: run the orders, answer, and stay until killed, since peers may still read this rank's memory."""
    reply = Reply(0)
    try:
        torch.set_num_threads(1)
        load_extensions_of(extensions)
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        streams: Device = QueuedDevice(staged=True)
        if device == "cuda":
            streams = CudaDevice(rank % max(1, torch.cuda.device_count()))
            torch.cuda.set_device(streams.place)
        store = dist.FileStore(os.path.join(directory, "store"), world_size)  # type: ignore[attr-defined]
        never = timedelta(days=1)  # the clock is the parent's
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=never)
        issued, _ = issue(loads(text), boundary, inputs)
        transport = perform if backend == "nccl" else run_through_host
        reply.results = run_orders(issued[rank], streams, transport, orders)
    except Exception as error:  # noqa: BLE001 - a reply that never comes would say less than any error
        reply.failure = f"{type(error).__name__}: {error}"
    for message in encode_reply(reply, values=True):
        connection.send_bytes(message)
    with contextlib.suppress(EOFError, OSError):
        connection.recv_bytes()


__all__ = ["backend_of", "compare_orders", "explore_on_cuda", "run_ranks", "run_through_host", "serve_rank"]
