"""Finding and Verdict status: what a check has to say. Data only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

#: What a finding costs. An error: wrong values, hangs, races, memory, illegal graphs. Hygiene: something is wrong that harms
#: only a later step which relies on it, such as metadata.
Severity: TypeAlias = Literal["error", "hygiene"]


@dataclass(frozen=True, slots=True, repr=False)
class Finding:
    """One thing that is wrong with the rewritten program.

    Attributes:
        kind: what went wrong, e.g. "wrong-value", "deadlock", "pass-raised"; one counterexample is kept per kind.
        check: the check that saw it, e.g. "equivalence".
        title: one line with the cause.
        detail: what an engineer wants next: actual and expected, the cycle, the traceback.
        node: the node of the rewritten graph that is to blame, when known.
        rank: the first rank that shows it, when it is a matter of ranks.
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
        """The number domain that shows it: "float64", where most show, whatever was asked for besides; "native" or "exact"."""
        return str(self.data.get("domain", "float64"))

    def __repr__(self) -> str:
        where = f", at '{self.node}'" * (self.node is not None) + f", rank {self.rank}" * (self.rank is not None)
        return f"<Finding {self.kind}: {self.title}{where}>"

    def __str__(self) -> str:
        return f"{self.kind}: {self.title}" + "".join(f"\n  {line}" for line in self.detail.splitlines())


#: Every kind of finding, with what it says. Reports and `Counterexample` ids use these names.
KINDS = {
    "malformed-graph": "the rewritten graph is not a legal FX graph",
    "changed-signature": "the rewritten graph takes or returns something else than the original",
    "stale-metadata": "meta['val'] of a rewritten node is missing or wrong",
    "deadlock": "ranks wait for each other for ever",
    "collective-mismatch": "ranks meet in one collective and disagree on what it is",
    "anchor-mismatch": "what an anchor binds by data flow is not what a runtime binds by position",
    "stream-conflict": "the anchors of an op name different streams",
    "race": "two accesses to one storage, one of them a write, are not ordered",
    "unordered-collectives": "two collectives of one communicator are not ordered on their rank",
    "stream-index": "a worker stream has an index that the pass promises not to use, or that there cannot be",
    "stream-not-restored": "another stream than the caller's is current at the end",
    "worker-not-synchronised": "a worker stream begins without waiting for the caller's stream",
    "resharding-left": "an op that changes layouts is left, although the pass promises to lower them all",
    "stream-axis-left": "a value has a stream axis, although the pass promises to make loops of them all",
    "wrong-schedule": "what the schedule predicts is not what its replay gives",
    "no-gain": "the schedule is not faster than running the ops one after the other",
    "exposed-communication": "communication is exposed for longer than before the pass",
    "async-race": "a node comes too close to a collective that is under way",
    "missing-wait": "nobody waits for a collective that has been started",
    "wait-before-start": "a wait stands before the start for which it is to wait",
    "changed-nodes": "the pass changes nodes, although it promises to move them only",
    "broken-order": "a node stands before one on which it depends",
    "reordered-collectives": "collectives of a communicator, or ops with an effect, come in another order",
    "changed-effects": "an op with an effect is gone, or runs more often",
    "peak-memory": "peak memory is above what the pass promises",
    "use-after-free": "a node uses memory that has been freed",
    "double-free": "memory is freed twice",
    "freed-input": "an input, which belongs to the caller, is freed",
    "freed-output": "what the graph returns is freed",
    "leak": "memory is not freed that the original frees, or that the pass promises to free",
    "overlapping-buffers": "two values that live at the same time overlap in the communication buffers",
    "buffer-mismatch": "a communication buffer cannot hold its value, or differs between ranks",
    "wrong-value": "an output differs from the original's",
    "arena-mismatch": "a value that lives in a communication buffer is overwritten, or is not what it is elsewhere",
    "wrong-alias": "outputs share storage differently than the original's",
    "rewritten-raises": "the rewritten program raises where the original did not",
    "impure-pass": "the pass is not a function of the graph it is given",
    "pass-raised": "the pass raised",
    "pass-timeout": "the pass did not come back in time",
    "pass-died": "the pass took its process down",
    "run-died": "a run of tcverify ended while it verified the program",
    "executor-divergence": "two executors, or an executor and a check of the order of streams, disagree",
}


@dataclass(frozen=True, slots=True)
class Note:
    """What a verdict says without changing it.

    Attributes:
        reason: "exact-aside" (the exact domain cannot model the program or its rewrite, so that floating point decided),
            "exact-decided" (float64 is too ill-conditioned to judge, and the exact domain agrees), "literal-changed" (a
            literal is a few ulps away from what the original's literals give), "native-aside" (the rewritten graph could not
            run in its own dtypes), "coarser-dtype" (the pass rounds values to a dtype coarser than those of the original,
            which only the native domain judges), "small-sizes" (the program is too large to run; what its sizes became) or
            "not-confirmed" (it has more ranks than process groups have here).
        detail: one sentence.
    """

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a verdict is inconclusive.

    Attributes:
        reason: "unsupported-op", "ill-conditioned", "overflow", "ill-typed-program", "executor-failed", "declined",
            "not-judged" (it did not run, and the check that would say why was not chosen), "not-portable" (only one
            process can hold the rewritten graph, so no process group ran it), "law-needed" (whether the versions are equal
            depends on a law of an op of which only the signature is known), "placement-needed" (or on inputs of which nothing
            is known being equal on the ranks) or "pass-memory" (the pass's process has grown
            so much that it was replaced).
        detail: one sentence.
    """

    reason: str
    detail: str


#: What a check may say.
Said: TypeAlias = Finding | Doubt | Note
