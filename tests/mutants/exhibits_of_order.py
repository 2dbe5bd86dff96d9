"""Exhibits of the gallery: collectives, graphs, the order of streams, and schedules."""

from __future__ import annotations

import operator

from torch import fx

from tcverify.ops import RECORD, WAIT, lookup
from tests.mutants import exhibit_programs as programs
from tests.mutants.exhibits import Exhibit

_SP, _MS = "tcverify.passes.sequence_parallel:SequenceParallel", "tcverify.passes.multistream:Multistream"
_IN_SP, _IN_MS, _FOREIGN, _GROUPS, _LOCAL = (
    f"tests.mutants.{name}:"
    for name in ("sequence_parallel", "multistream", "foreign", "foreign_groups", "foreign_local")
)

COLLECTIVES, GRAPHS, STREAMS, TIME = "collectives and groups", "graphs and metadata", "order of streams", "schedules"


def _ungated(node: fx.Node) -> fx.Node:
    """What a node stands for, seen through the wait in front of its reader."""
    while lookup(node.target).name == WAIT:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _is_work(node: fx.Node) -> bool:
    return lookup(node.target).name not in (WAIT, RECORD) and node.target is not operator.getitem


def _reads_an_item(node: fx.Node) -> bool:
    """An op that reads an item of a tuple."""
    return _is_work(node) and any(_ungated(n).target is operator.getitem for n in node.all_input_nodes)


def _reads_a_collective(node: fx.Node) -> bool:
    """An op that reads the result of a collective."""
    sources = [_ungated(n) for n in node.all_input_nodes]
    return _is_work(node) and any(n.op == "call_function" and lookup(n.target).collective for n in sources)


def _waits_for_a_token(node: fx.Node) -> bool:
    """An op behind a wait for a token."""
    return _is_work(node) and any(lookup(n.target).name == WAIT and n.args[2] for n in node.all_input_nodes)


def _is_collective(node: fx.Node) -> bool:
    return lookup(node.target).collective


def _is_returned(node: fx.Node) -> bool:
    """An op whose result the program returns, or an input's writer."""
    return _is_work(node) and any(user.op == "output" for user in node.users)


_WRITES = ("add_", "add__[0-9]*", "mul_", "mul__[0-9]*", "copy_", "copy__[0-9]*")

ORDER: tuple[Exhibit, ...] = (
    Exhibit(
        "world-instead-of-subgroup",
        "A fused collective runs over all ranks in place of its subgroup",
        COLLECTIVES,
        "The fused matmul and all_reduce is emitted on the default group. With one tensor-parallel group that is the right "
        "one; beside a data-parallel dim it adds up the results of different batches.",
        _GROUPS + "FusedOverWorld", _GROUPS + "FuseMatmul", "wrong-value", ("matmul_all_reduce*",), ("VLLM-45917",),
        world_size=4, options={"world_size": 4}, strategy="structured",
    ),
    Exhibit(
        "bucket-over-two-groups",
        "Collectives of two groups share a bucket",
        COLLECTIVES,
        "The key of a bucket lacks the group, so the second member is summed over the group of the first. Nothing hangs: "
        "all ranks agree on the wrong group.",
        _GROUPS + "BucketOfAllGroups", _GROUPS + "Bucket", "wrong-value", ("all_reduce_default*", "clone_default_1"),
        ("PT-158632",), world_size=4,
    ),
    Exhibit(
        "bucket-of-two-kinds",
        "A reduce_scatter shares a bucket with an all_reduce",
        COLLECTIVES,
        "The key of a bucket lacks the kind of collective. The bucket is all-reduced, and every rank takes the first chunk "
        "for its own: the first rank of each group is right.",
        _GROUPS + "BucketOfAllKinds", _GROUPS + "Bucket", "wrong-value",
        ("slice_tensor_1", "reshape_default_3", "clone_default_1"), ("PT-175150",), strategy="wild",
    ),
    Exhibit(
        "collective-skipped-on-one-rank",
        "The first rank skips a collective that the others enter",
        COLLECTIVES,
        "A decision that should be the same on all ranks depends on the position in the group. The others wait until "
        "a time-out that names another line of another program.",
        _IN_SP + "GatherSkippedOnFirstRank", _SP, "deadlock", ("all_gather*",), strategy="structured",
    ),
    Exhibit(
        "collective-erased-as-dead",
        "Dead-code elimination erases a collective on the rank that does not read it",
        COLLECTIVES,
        "A collective without readers looks like dead code. Where the ranks' graphs differ, one erases it and the other "
        "waits for it for ever.",
        _GROUPS + "CollectiveErased", _GROUPS + "EraseUnread", "deadlock", ("all_reduce*",), ("PT-131023",),
        made=programs.collective_read_on_one_rank,
    ),
    Exhibit(
        "ranks-disagree-on-a-collective",
        "One rank scatters where another still reduces",
        COLLECTIVES,
        "A rewrite leaves a useless all_reduce behind on all ranks but one. On that one the next collective of the group "
        "meets it: with equal sizes some backends exchange garbage in place of hanging.",
        _IN_SP + "AllReduceErasedOnFirstRank", _SP, "collective-mismatch", ("all_reduce*",),
        strategy="structured",
    ),
    Exhibit(
        "collectives-ordered-by-cost",
        "Ranks issue their collectives in the order of their own costs",
        COLLECTIVES,
        "Two independent collectives are ordered by what each rank thinks they cost. Where costs differ between ranks, so "
        "do the orders, and ranks meet in different collectives.",
        _IN_MS + "CostsOrderCollectives", _MS, "deadlock", _is_collective,
        ("PT-141697", "TREC-4149"), strategy="overlap", world_size=4,
    ),
    Exhibit(
        "remembered-from-another-rank",
        "What was computed for one rank's graph is used for the next",
        GRAPHS,
        "The pass keeps a table by shape. Ranks have equal shapes, so all of them take the shard of the first one that "
        "was compiled; with a process per rank it works.",
        _FOREIGN + "RememberedFromFirstRank", _FOREIGN + "ScatterBySlice", "wrong-value", ("slice*",), strategy="wild",
    ),
    Exhibit(
        "numbered-by-the-process",
        "The result depends on what was compiled before",
        GRAPHS,
        "Regions are numbered by a counter that nobody resets. Two compilations of one model differ: caches miss, and ranks "
        "that compile in different orders do not agree.",
        _LOCAL + "NumberedByProcess", _LOCAL + "NameRegions", "impure-pass", strategy="structured", deep=True,
    ),
    Exhibit(
        "bucket-before-its-operands",
        "A bucket stands in front of what it sums",
        GRAPHS,
        "Collectives are merged where the first one stood, but the second one's operand is made later, even of the first "
        "one's result: there is no place for such a bucket.",
        _GROUPS + "BucketAtFirstMember", _GROUPS + "Bucket", "malformed-graph", ("reshape_default*",), ("PT-158663",),
    ),
    Exhibit(
        "node-of-another-graph",
        "A node reads one of the graph that was left behind",
        GRAPHS,
        "A graph is copied call by call, and one that was left out has readers that nobody redirected. FX notices only "
        "when it checks the graph, or writes code that names a variable which does not exist.",
        _LOCAL + "StrayNode", _LOCAL + "Rebuild", "malformed-graph", ("output",), ("PT-175812-3",), strategy="structured",
    ),
    Exhibit(
        "stale-metadata",
        "The recorded shape is that of before",
        GRAPHS,
        "Values are right, but what the graph says about them is not: the next pass plans memory, or picks a pattern, by "
        "shapes that no longer exist.",
        _IN_SP + "StaleMetadata", _SP, "stale-metadata", ("*norm*", "getitem*", "add*", "view*"), strategy="structured",
    ),
    Exhibit(
        "shared-fake-storage",
        "Two values carry one fake tensor",
        GRAPHS,
        "Metadata was copied along with a node, object and all. Whoever plans memory by storage takes two tensors for one, "
        "and frees or reuses both.",
        _IN_SP + "ScattersShareStorage", _SP, "stale-metadata", ("reduce_scatter*",), ("TT-3343",), strategy="structured",
    ),
    Exhibit(
        "caller-not-waited-for",
        "A side stream does not wait for the caller's",
        STREAMS,
        "A collective of an input starts on its own stream at once, while the caller's stream may still write the input. "
        "Under a light load the write is always through in time.",
        _LOCAL + "CallerNotWaitedFor", _LOCAL + "SideStream", "race", _is_collective,
        ("NVF-3913",), strategy="structured",
    ),
    Exhibit(
        "another-producer-waited-for",
        "A wait names the op before the one that it should wait for",
        STREAMS,
        "The stream waits for a token, but it is not the token of what it reads. The values are right whenever both "
        "streams are quick enough.",
        _IN_MS + "WaitForAnotherProducer", _MS, "race", _waits_for_a_token, ("DS-7898",), strategy="overlap",
    ),
    Exhibit(
        "tuple-dependency-lost",
        "Nothing waits for an item of a tuple",
        STREAMS,
        "The selection of one result is no op of its own, and the dependency on it is dropped with it.",
        _IN_MS + "TupleDependencyUntracked", _MS, "race", _reads_an_item, strategy="overlap",
    ),
    Exhibit(
        "write-overtakes-read",
        "A write does not wait for what still reads the old value",
        STREAMS,
        "A collective on one stream reads a tensor that an op in place overwrites on another. Only edges from writes to "
        "reads were drawn.",
        _IN_MS + "WriteAfterReadUntracked", _MS, "race", _WRITES, ("PT-112439",), strategy="overlap",
    ),
    Exhibit(
        "outputs-not-joined",
        "The program returns what another stream still computes",
        STREAMS,
        "The output waits for nothing. Whoever synchronises the whole device, as tests do, never sees it.",
        _IN_MS + "OutputsNotJoined", _MS, "race", _is_returned, strategy="overlap", data={"kind": "output"},
    ),
    Exhibit(
        "collectives-unordered",
        "Two collectives of one group on two streams, in no order",
        STREAMS,
        "Each waits for its operands and for nothing else, so ranks may enter them in different orders. It takes a busy "
        "machine to do so.",
        _IN_MS + "CollectivesUnordered", _MS, "unordered-collectives",
        _is_collective, ("MG-1810",), strategy="overlap",
    ),
    Exhibit(
        "token-shared-by-collectives",
        "One token stands for several collectives",
        STREAMS,
        "All collectives of a stream are recorded by the token of the first, so that who waits for the last waits for too "
        "little. Shown behind another pass: the report names the stage that broke the program.",
        f"{_SP}+{_IN_MS}TokenSharedByCollectives", f"{_SP}+{_MS}", "race",
        lambda node: _reads_a_collective(node) or _is_returned(node),
        ("MG-1810",),
    ),
    Exhibit(
        "wait-names-another-stream",
        "An op is bound to one stream and recorded on another",
        STREAMS,
        "Waits name stream 0, records the stream of the plan. Which of them wins is up to the runtime.",
        _IN_MS + "WaitNamesMainStream", _MS, "stream-conflict", _is_collective,
        strategy="overlap",
    ),
    Exhibit(
        "record-behind-another-op",
        "A record stands where its value is needed, not where it is made",
        STREAMS,
        "By data flow the token completes the right op. A runtime that records the op issued last completes another.",
        _IN_MS + "RecordedWhereNeeded", _MS, "anchor-mismatch", ("*_record*",), strategy="overlap",
    ),
    Exhibit(
        "makespan-of-another-order",
        "The schedule declares the time of an order that it does not have",
        TIME,
        "The graph was reordered after its time had been computed. Whoever compares schedules by what they declare picks "
        "the wrong one.",
        _IN_MS + "OldMakespanDeclared", _MS, "wrong-schedule", ("output",), strategy="overlap", world_size=4,
    ),
    Exhibit(
        "no-gain",
        "A schedule that is no faster than running op after op",
        TIME,
        "The graph is lowered to streams although the plan says that nothing is gained: all of the risk for none of the "
        "time.",
        _IN_MS + "NoGuard", _MS, "no-gain", ("output",), strategy="overlap",
    ),
)  # fmt: skip
