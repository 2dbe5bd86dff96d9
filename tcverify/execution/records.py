"""Comparisons as JSON-able data: of rewritten programs that only the process that made them can run, or of pools elsewhere."""

from __future__ import annotations

from typing import Any

from tcverify.execution.executor import CollectiveWait, Comparison, Hang, Run
from tcverify.execution.interpreter import CollectiveCall
from tcverify.execution.process_group.messages import (
    decode_collective,
    decode_delta,
    decode_result,
    encode_collective,
    encode_delta,
    encode_result,
)


def encode_comparison(comparison: Comparison) -> dict[str, Any]:
    """Write a comparison without the tensors."""
    return {
        "executor": comparison.executor,
        "original": _encode_run(comparison.original),
        "rewritten": _encode_run(comparison.rewritten),
        "deltas": [encode_delta(delta) for delta in comparison.deltas],
        "reference": _encode_run(comparison.reference) if comparison.reference is not None else None,
    }


def decode_comparison(data: dict[str, Any]) -> Comparison:
    """Read what `encode_comparison` wrote."""
    deltas = [decode_delta(delta) for delta in data["deltas"]]
    reference = _decode_run(data["reference"]) if data["reference"] is not None else None
    return Comparison(
        data["executor"], _decode_run(data["original"]), _decode_run(data["rewritten"]), deltas, reference
    )


def _encode_run(run: Run) -> dict[str, Any]:
    ranks = [encode_result(result, None) for result in run.ranks]
    data: dict[str, Any] = {"executor": run.executor, "domain": run.domain, "ranks": ranks}
    if run.hang is not None:
        waits = [[w.rank, w.call.node, encode_collective(w.call.collective), w.ordinal] for w in run.hang.waits]
        data["hang"] = [waits, run.hang.cycle, run.hang.finished]
    if run.mismatch is not None:
        sentence, calls = run.mismatch
        data["mismatch"] = [sentence, [[r, c.node, encode_collective(c.collective)] for r, c in calls.items()]]
    return data


def _decode_run(data: dict[str, Any]) -> Run:
    ranks = [decode_result(rank, result, []) for rank, result in enumerate(data["ranks"])]
    run = Run(data["executor"], ranks, domain=data["domain"])
    if "hang" in data:
        waits, cycle, finished = data["hang"]
        run.hang = Hang(
            tuple(CollectiveWait(r, CollectiveCall(n, decode_collective(c)), o) for r, n, c, o in waits),
            cycle,
            finished,
        )
    if "mismatch" in data:
        sentence, calls = data["mismatch"]
        run.mismatch = sentence, {r: CollectiveCall(n, decode_collective(c)) for r, n, c in calls}
    return run
