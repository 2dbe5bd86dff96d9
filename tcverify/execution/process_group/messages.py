"""Messages between a pool and its ranks: JSON text, followed by one binary frame if there are tensors.

To a rank: a request (`{"id", "jobs", "observe"}`) or, after a reply that it is held at, `{"go": id}`. From a rank: replies.
Floats travel as Python's JSON writes them, exactly, with NaN and Infinity.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tcverify.domains import Domain, domain_of
from tcverify.errors import ExecutorError, InternalError, ProgramError, TcverifyError, UnsupportedOp
from tcverify.execution.compare import Delta, digest
from tcverify.execution.interpreter import CollectiveCall, NodeError, RankResult
from tcverify.execution.plan import ExecutionPlan, decode_plan, encode_plan, plans_of
from tcverify.ops import Collective, Layout, Resharding
from tcverify.program import NotSerialisable, Program
from tcverify.program.codec import encode_ranks, encode_sources
from tcverify.program.decoding import Reader
from tcverify.program.graph import RankBinding
from tcverify.program.inputs import Sources


@dataclass(slots=True)
class Reply:
    """A rank's answer to one request.

    Attributes:
        number: of the request.
        results: the execution of the rank, per program; those after one that raised are missing.
        deltas: how the two programs differ on this rank, if it finished both.
        refusal: set if the rank cannot run the program: an op or the inputs.
        failure: set if torch.distributed failed; the group is unusable then.
        left: whether the rank stopped while collectives that it had started were in flight. Then the group is unusable:
            collectives of the next program would match them.
    """

    number: int
    results: list[RankResult] = field(default_factory=list)
    deltas: list[Delta] = field(default_factory=list)
    refusal: TcverifyError | None = None
    failure: str | None = None
    left: bool = False

    @property
    def held(self) -> bool:
        """Whether the rank stopped short of the end and waits for the go-ahead before it serves the next request."""
        return self.refusal is not None or any(result.error is not None for result in self.results)


@dataclass(frozen=True, slots=True)
class RankJob:
    """A program as rank processes run it."""

    plans: list[ExecutionPlan]
    ranks: tuple[RankBinding, ...]
    sources: Sources
    domain: Domain


def encode_request(number: int, programs: Sequence[Program], observe: bool, domains: Sequence[Domain]) -> bytes:
    """Write a request.

    Args:
        domains: in which each of the programs runs.

    Raises:
        ExecutorError: a program holds what a program file cannot.
    """
    jobs: list[dict[str, Any] | None] = []  # None: the program before, whose results count twice
    try:
        for position, (program, domain) in enumerate(zip(programs, domains, strict=True)):
            if position and program is programs[position - 1] and domain is domains[position - 1]:
                jobs.append(None)
                continue
            plans = [encode_plan(plan) for plan in plans_of(program, domain)]
            job = {"plans": plans, "ranks": encode_ranks(program), "domain": domain.name}
            if not jobs or program.sources != programs[0].sources:
                job["sources"] = encode_sources(program.sources)
            jobs.append(job)
    except NotSerialisable as error:
        raise ExecutorError(
            f"the program cannot be sent to the processes of a group: {error.message}",
            "lockstep runs such programs; the process group runs what program files can hold",
        ) from None
    return _dumps({"id": number, "jobs": jobs, "observe": observe})


def decode_jobs(data: list[Any]) -> Iterator[RankJob | None]:
    """Read the programs of a request, each on demand; None is the same one again.

    Raises:
        UnsupportedOp: an op is missing from the tables of this process.
    """
    reader = Reader("the message")
    sources: Sources | None = None
    for job in data:
        if job is None:
            yield None
            continue
        if "sources" in job:
            sources = reader.sources(job["sources"])
        if sources is None:
            raise InternalError("a request without inputs")
        domain = domain_of(job["domain"])
        plans = [decode_plan(plan, domain) for plan in job["plans"]]
        yield RankJob(plans, reader.ranks(job["ranks"]), sources, domain)


def encode_go(number: int) -> bytes:
    """Write the go-ahead for ranks that are held at a reply."""
    return _dumps({"go": number})


def encode_reply(reply: Reply, *, values: bool) -> list[bytes]:
    """Write a reply: one message, or two when tensors travel.

    Args:
        values: whether outputs and observed values travel too, not only what is said about them.
    """
    store = _Storages()
    data: dict[str, Any] = {
        "id": reply.number,
        "results": [encode_result(result, store if values else None) for result in reply.results],
        "deltas": [encode_delta(delta) for delta in reply.deltas],
    }
    if isinstance(reply.refusal, UnsupportedOp):
        data["refusal"] = {"op": reply.refusal.op, "reason": reply.refusal.reason}
    elif reply.refusal is not None:
        data["refusal"] = {"message": reply.refusal.message, "hint": reply.refusal.hint}
    if reply.failure is not None:
        data["failure"] = reply.failure
    if reply.left:
        data["left"] = True
    if values:
        data["storages"] = [len(piece) for piece in store.pieces]
        return [_dumps(data), b"".join(store.pieces)]
    return [_dumps(data)]


def decode_reply(rank: int, data: dict[str, Any], blob: bytes) -> Reply:
    """Read a reply of `rank`.

    Args:
        data: the parsed first message.
        blob: the second message; empty when there is none.
    """
    storages = _storages(data.get("storages", []), blob)
    refusal = data.get("refusal")
    error: TcverifyError | None = None
    if refusal is not None:
        error = (
            UnsupportedOp(refusal["op"], refusal["reason"])
            if "op" in refusal
            else ProgramError(refusal["message"], refusal["hint"])
        )
    return Reply(
        number=data["id"],
        results=[decode_result(rank, result, storages) for result in data["results"]],
        deltas=[decode_delta(delta) for delta in data["deltas"]],
        refusal=error,
        failure=data.get("failure"),
        left=data.get("left", False),
    )


def _dumps(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


# ------------------------------------------------------------------------------------------------------------ results


def encode_result(result: RankResult, store: _Storages | None) -> dict[str, Any]:
    data: dict[str, Any] = {
        "structure": result.structure,
        "calls": [[call.node, encode_collective(call.collective)] for call in result.calls],
        "digest": result.digest or digest(result.outputs),
    }
    if result.error is not None:
        data["error"] = [result.error.node, result.error.message]
    if store is not None:
        data["outputs"] = [_encode_value(value, store) for value in result.outputs]
        data["inputs"] = [_encode_value(value, store) for value in result.inputs]
        data["input_names"] = result.input_names
        data["mutates"] = result.mutates
        if result.values is not None:
            data["values"] = [[name, _encode_value(value, store)] for name, value in result.values.items()]
    return data


def decode_result(rank: int, data: dict[str, Any], storages: list[torch.UntypedStorage]) -> RankResult:
    result = RankResult(rank, structure=data["structure"], digest=data["digest"])
    result.calls = [CollectiveCall(node, decode_collective(collective)) for node, collective in data["calls"]]
    if "error" in data:
        result.error = NodeError(*data["error"])
    if "outputs" in data:
        result.outputs = [_decode_value(value, storages) for value in data["outputs"]]
        result.inputs = [_decode_value(value, storages) for value in data["inputs"]]
        result.input_names = data["input_names"]
        result.mutates = data["mutates"]
    if "values" in data:
        result.values = {name: _decode_value(value, storages) for name, value in data["values"]}
    return result


def encode_collective(call: Collective) -> list[Any]:
    made = call.resharding
    asked = None if made is None else [str(made.source), str(made.target), made.shape, made.dim, made.reduce_op]
    first = [call.kind, call.communicator, call.shape, _dtype_name(call.dtype), call.dim, call.reduce_op, call.splits]
    return [*first, call.root, call.group, call.joined, call.targets, asked]


def decode_collective(data: list[Any]) -> Collective:
    kind, members, shape, dtype, dim, reduce_op, splits, root, group, joined, targets, asked = data
    pair = (tuple(splits[0]), tuple(splits[1])) if splits is not None else None
    made = None
    if asked is not None:
        made = Resharding(Layout.parse(asked[0]), Layout.parse(asked[1]), tuple(asked[2]), *asked[3:])
    return Collective(
        kind, tuple(members), tuple(shape), getattr(torch, dtype), dim, reduce_op, pair, root, group, joined,
        None if targets is None else tuple(targets), made,
    )  # fmt: skip


def encode_delta(delta: Delta) -> dict[str, Any]:
    """Write a difference as JSON-able data."""
    dtype = None if delta.dtype is None else _dtype_name(delta.dtype)
    return {f.name: getattr(delta, f.name) for f in dataclasses.fields(delta)} | {"dtype": dtype}


def decode_delta(data: dict[str, Any]) -> Delta:
    """Read what `encode_delta` wrote."""
    dtype = None if data["dtype"] is None else getattr(torch, data["dtype"])
    return Delta(**{**data, "worst": tuple(data["worst"]), "dtype": dtype})


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------------- values


class _Storages:
    """The bytes of tensors' storages, each once, so that tensors that share one still do on the other side."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self._index: dict[int, int] = {}

    def add(self, storage: torch.UntypedStorage) -> int:
        """Add a storage and return its number."""
        number = self._index.get(storage._cdata)
        if number is None:
            number = self._index[storage._cdata] = len(self.pieces)
            host = storage.cpu()
            self.pieces.append(ctypes.string_at(host.data_ptr(), host.nbytes()) if host.nbytes() else b"")
        return number


def _storages(sizes: list[int], blob: bytes) -> list[torch.UntypedStorage]:
    found = []
    start = 0
    for size in sizes:
        if size:
            found.append(torch.frombuffer(bytearray(blob[start : start + size]), dtype=torch.uint8).untyped_storage())
        else:
            found.append(torch.UntypedStorage(0))
        start += size
    return found


def _encode_value(value: Any, store: _Storages) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().resolve_neg()
        number = store.add(plain.untyped_storage())
        shape, stride = list(plain.shape), list(plain.stride())
        return {"tensor": [number, plain.storage_offset(), shape, stride, _dtype_name(plain.dtype)]}
    if isinstance(value, (tuple, list)):
        return {"tuple" if isinstance(value, tuple) else "list": [_encode_value(v, store) for v in value]}
    if isinstance(value, dict):
        return {"dict": [[str(k), _encode_value(v, store)] for k, v in value.items()]}
    return {"text": repr(value)}


def _decode_value(data: Any, storages: list[torch.UntypedStorage]) -> Any:
    if not isinstance(data, dict):
        return data
    ((kind, inner),) = data.items()
    if kind == "tensor":
        number, offset, shape, stride, dtype = inner
        return torch.empty(0, dtype=getattr(torch, dtype)).set_(storages[number], offset, shape, stride)
    if kind == "dict":
        return {k: _decode_value(v, storages) for k, v in inner}
    if kind == "text":
        return inner
    values = [_decode_value(v, storages) for v in inner]
    return tuple(values) if kind == "tuple" else values
