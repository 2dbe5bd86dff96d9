"""Findings, doubts and notes: the results of checks. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

#: Severities of findings. An error: wrong values, hangs, races, memory, illegal graphs. Hygiene: a defect that harms
#: only a later step which relies on it, such as metadata.
Severity: TypeAlias = Literal["error", "hygiene"]


@dataclass(frozen=True, slots=True, repr=False)
class Finding:
    """A defect of the rewritten program.

    Attributes:
        kind: the kind of defect, e.g. "wrong-value", "deadlock", "pass-raised"; one counterexample is kept per kind.
        check: the check that found it, e.g. "equivalence".
        title: one line with the cause.
        detail: further details: actual and expected values, the cycle, the traceback.
        node: the faulty node of the rewritten graph, if known.
        rank: the first rank on which it occurs, if it depends on ranks.
        data: further facts for reports, JSON-able.
        severity: "error", or "hygiene", which does not refute a pass.
    """

    kind: str
    check: str
    title: str
    detail: str = ""
    node: str | None = None
    rank: int | None = None
    data: dict[str, Any] = field(default_factory=dict, hash=False)
    severity: Severity = "error"

    @property
    def domain(self) -> str:
        """The number domain in which it occurs: "float64" by default, or "native" or "exact"."""
        return str(self.data.get("domain", "float64"))

    def __repr__(self) -> str:
        where = f", at '{self.node}'" * (self.node is not None) + f", rank {self.rank}" * (self.rank is not None)
        return f"<Finding {self.kind}: {self.title}{where}>"

    def __str__(self) -> str:
        return f"{self.kind}: {self.title}" + "".join(f"\n  {line}" for line in self.detail.splitlines())


#: Description of every kind of finding. Reports and `Counterexample` ids use these names.
KINDS = {
    "malformed-graph": "the rewritten graph is not a legal FX graph",
    "changed-signature": "the rewritten graph has a different signature from the original",
    "stale-metadata": "meta['val'] of a rewritten node is missing or wrong",
    "deadlock": "ranks wait for each other forever",
    "collective-mismatch": "ranks meet in a collective but disagree on which one it is",
    "anchor-mismatch": "an anchor binds one op by data flow and another by position",
    "stream-conflict": "the anchors of an op name different streams",
    "race": "two accesses to one storage, one of them a write, are not ordered",
    "unordered-collectives": "two collectives of one communicator are not ordered on their rank",
    "stream-index": "a worker stream has an invalid index, or one that the pass promises not to use",
    "stream-not-restored": "the caller's stream is not current at the end",
    "worker-not-synchronised": "a worker stream starts without waiting for the caller's stream",
    "resharding-left": "an op that changes layouts is left, although the pass promises to lower them all",
    "stream-axis-left": "a value has a stream axis, although the pass promises to turn all of them into loops",
    "wrong-schedule": "the replay of the schedule differs from its prediction",
    "no-gain": "the schedule is not faster than running the ops sequentially",
    "exposed-communication": "communication is exposed for longer than before the pass",
    "async-race": "a node conflicts with a collective in flight",
    "missing-wait": "no node waits for a collective that was started",
    "wait-before-start": "a wait precedes the start that it should wait for",
    "changed-nodes": "the pass changes nodes, although it promises only to move them",
    "broken-order": "a node precedes one that it depends on",
    "reordered-collectives": "collectives of a communicator, or ops with an effect, are reordered",
    "changed-effects": "an op with an effect is missing, or runs more often",
    "peak-memory": "peak memory is above what the pass promises",
    "wrong-estimate": "an estimate of the pass is not what it estimates",
    "use-after-free": "a node uses memory that has been freed",
    "double-free": "memory is freed twice",
    "freed-input": "an input, which belongs to the caller, is freed",
    "freed-output": "a returned value is freed",
    "leak": "memory is not freed although the original frees it, or the pass promises to",
    "overlapping-buffers": "two values that are live at the same time overlap in the communication buffers",
    "buffer-mismatch": "a communication buffer cannot hold its value, or differs between ranks",
    "wrong-value": "an output differs from the original's",
    "arena-mismatch": "a value in a communication buffer is overwritten, or differs from its value outside the buffer",
    "wrong-alias": "outputs do not share memory as the original's do",
    "rewritten-raises": "the rewritten program raises where the original did not",
    "impure-pass": "the pass is not a pure function of its graph",
    "pass-raised": "the pass raised",
    "pass-timeout": "the pass exceeded its time limit",
    "pass-died": "the pass crashed its process",
    "run-died": "a run of tcverify ended while verifying the program",
    "executor-divergence": "two executors disagree, or an executor and the check of streams",
}


@dataclass(frozen=True, slots=True)
class Note:
    """A remark of a verdict that does not change its status.

    Attributes:
        reason: "exact-aside" (the exact domain cannot model the program or its rewrite, so float64 decided),
            "exact-decided" (float64 is too ill-conditioned to judge, and the exact domain agrees), "literal-changed" (a
            literal is a few ulps away from what the original's literals give), "native-aside" (the rewritten graph could not
            run in its own dtypes), "coarser-dtype" (the pass rounds values to a dtype coarser than those of the original,
            which only the native domain judges), "small-sizes" (the program is too large to run; its sizes after scaling down) or
            "not-confirmed" (it has more ranks than process groups have here, or a domain that the executor does not have).
        detail: one sentence.
    """

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a verdict is inconclusive.

    Attributes:
        reason: "unsupported-op", "ill-conditioned", "overflow", "ill-typed-program", "executor-failed", "declined",
            "not-judged" (the rewritten program did not run, and the check that reports the reason was not selected),
            "not-portable" (only one process can hold the rewritten graph, so no process group ran it), "law-needed" (the
            versions are equal only if an op of which only the signature is known has a certain law), "placement-needed"
            (they are equal only if inputs with an unknown placement are equal on the ranks) or "pass-memory" (the pass's
            process has grown so much that it was replaced).
        detail: one sentence.
    """

    reason: str
    detail: str


#: What a check may return.
Said: TypeAlias = Finding | Doubt | Note
