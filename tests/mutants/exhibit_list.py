"""What the gallery shows: one exhibit per class of defects, the arithmetic of rounding last."""

from __future__ import annotations

import operator

from torch import fx

from tcverify.ops import RECORD, WAIT, lookup
from tests.mutants import exhibit_programs as programs
from tests.mutants.exhibits import Exhibit

_SP, _MS = "tcverify.passes.sequence_parallel:SequenceParallel", "tcverify.passes.multistream:Multistream"
_IN_SP, _IN_MS, _FOREIGN, _LOCAL, _TINY = (
    f"tests.mutants.{name}:" for name in ("sequence_parallel", "multistream", "foreign", "foreign_local", "tiny")
)

SUMS, SHARDS, COLLECTIVES = "sums over ranks", "shards and placements", "collectives and groups"
LOCAL, STORAGE, GRAPHS = "ops of one rank", "storage and writes", "graphs and metadata"
STREAMS, TIME, ROUNDING = "order of streams", "schedules", "hidden by rounding"


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


def _reads_a_view(node: fx.Node) -> bool:
    """An op that reads a view, or the view."""
    sources = [_ungated(n) for n in (node, *node.all_input_nodes)]
    return _is_work(node) and any(n.op == "call_function" and lookup(n.target).aliases for n in sources)


def _waits_for_a_token(node: fx.Node) -> bool:
    """An op behind a wait for a token."""
    return _is_work(node) and any(lookup(n.target).name == WAIT and n.args[2] for n in node.all_input_nodes)


def _is_collective(node: fx.Node) -> bool:
    return lookup(node.target).collective


def _is_returned(node: fx.Node) -> bool:
    """An op whose result the program returns, or an input's writer."""
    return _is_work(node) and any(user.op == "output" for user in node.users)


_WRITES = ("add_", "add__[0-9]*", "mul_", "mul__[0-9]*", "copy_", "copy__[0-9]*")

EXHIBITS: tuple[Exhibit, ...] = (
    # -------------------------------------------------------------------------------------------------- sums over ranks
    Exhibit(
        "constant-added-on-every-rank",
        "A constant goes into a sum once per rank",
        SUMS,
        "An all_reduce sinks below the addition of a number, which every rank then adds before the sum. Shapes, dtypes and "
        "collectives are what they were; only the values are off, by a constant.",
        _FOREIGN + "SunkBelowConstant", _FOREIGN + "SinkAllReduce", "wrong-value", ("add*", "all_reduce*"),
        ("PT-163193",), made=programs.constant_behind_sum,
    ),
    Exhibit(
        "residual-added-on-every-rank",
        "The residual goes into a sum once per rank",
        SUMS,
        "An all_reduce sinks below the residual addition: with n ranks the result holds n residuals. It looks like a legal "
        "change of order, and on one rank it is.",
        _FOREIGN + "SunkBelowResidual", _FOREIGN + "SinkAllReduce", "wrong-value", ("add*", "all_reduce*"),
        ("PT-163193",), strategy="structured",
    ),
    Exhibit(
        "bias-added-on-every-rank",
        "A fused product adds its bias on every rank",
        SUMS,
        "A bias that was added behind the sum becomes the bias of a fused matmul and all_reduce, which adds it before: the "
        "result holds one bias per rank. The fused op takes a bias, so nothing complains.",
        _FOREIGN + "BiasOnEveryRank", _FOREIGN + "FuseMatmul", "wrong-value", ("matmul_all_reduce*",),
        ("PT-163193",),
    ),
    Exhibit(
        "activation-before-the-sum",
        "An activation is applied to addends in place of their sum",
        SUMS,
        "An all_reduce sinks below a function that is not linear. Where all addends have one sign, relu hides it: test "
        "inputs that are positive do not show the defect.",
        _FOREIGN + "SunkBelowActivation", _FOREIGN + "SinkAllReduce", "wrong-value",
        ("silu*", "gelu*", "relu*", "tanh*", "all_reduce*"), ("PT-165962",), strategy="wild",
    ),
    Exhibit(
        "contribution-lost",
        "One rank's addend is missing from the sum",
        SUMS,
        "An all_reduce is taken apart into a gather and a sum whose range ends one member too early. Every rank gets the "
        "same wrong sum, so comparing ranks with each other finds nothing.",
        _FOREIGN + "ContributionLost", _FOREIGN + "ReduceByGather", "wrong-value", ("slice*", "sum*"),
        strategy="structured",
    ),
    Exhibit(
        "contribution-counted-twice",
        "Every rank's own addend is counted twice",
        SUMS,
        "The sum starts from this rank's addend and then adds all members', its own among them. The results differ between "
        "ranks that should agree.",
        _FOREIGN + "ContributionTwice", _FOREIGN + "ReduceByGather", "wrong-value", ("add_tensor*",),
        strategy="structured",
    ),
    Exhibit(
        "averaged-instead-of-summed",
        "A mean over the ranks in place of their sum",
        SUMS,
        "Two conventions meet: addends that are divided by the number of ranks, and addends that are not. A norm behind "
        "the sum hides the factor from all but a residual.",
        _FOREIGN + "AveragedInsteadOfSummed", _FOREIGN + "ReduceByGather", "wrong-value", ("mean*",),
        strategy="structured",
    ),
    Exhibit(
        "residual-added-twice",
        "The residual is added by the sum and again by the norm",
        SUMS,
        "A rewrite turns the norm behind a residual sum into one that adds the residual itself, and leaves the sum. All "
        "shapes fit; with a small residual the model only gets a little worse.",
        _IN_SP + "ResidualAddedTwice", _SP, "wrong-value", ("rms_norm*",), strategy="structured",
    ),
    # ------------------------------------------------------------------------------------------ shards and placements
    Exhibit(
        "residual-not-sliced",
        "A norm gets a shard of the hidden state and all of the residual",
        SHARDS,
        "The all_reduce of one operand becomes a reduce_scatter; the other operand stays on all tokens. With one token, or "
        "where the residual broadcasts, shapes fit by accident and nothing raises.",
        _IN_SP + "ResidualNotSliced", _SP, "rewritten-raises", ("add*",), ("TC-1999628", "VLLM-50155"),
        strategy="structured",
    ),
    Exhibit(
        "rank-number-picks-the-shard",
        "The rank's number picks the shard, in place of its position in the group",
        SHARDS,
        "In groups such as [1, 0] or [0, 2] the number of a rank is not its position. On one host with one group the two "
        "are the same, so the defect waits for the first two-dimensional mesh.",
        _IN_SP + "RankNumberPicksShard", _SP, "wrong-value", ("residual_shard*",), ("PT-158632",),
        strategy="structured", world_size=4,
    ),
    Exhibit(
        "first-shard-on-every-rank",
        "Every rank takes the first shard",
        SHARDS,
        "Every rank slices a replicated value from 0 on. The first rank is right, and it is the one that people look at.",
        _IN_SP + "FirstChunkForAll", _SP, "wrong-value", ("residual_shard*",), strategy="structured",
    ),
    Exhibit(
        "varying-value-sliced",
        "A value that differs between ranks is sliced as if it were replicated",
        SHARDS,
        "Each rank takes its chunk of what it holds, and a gather puts chunks of different values together. Shapes say "
        "nothing about it: only where a value comes from tells whether all ranks hold the same.",
        _IN_SP + "VaryingAddendSliced", _SP, "wrong-value", ("residual_shard*", "all_gather*"), ("VLLM-24021",),
        strategy="near-miss",
    ),
    Exhibit(
        "broadcast-operand-sliced",
        "One row for all tokens is sliced like a row per token",
        SHARDS,
        "An addend that broadcasts over the tokens is cut into as many chunks as there are ranks. Where its size is 1, "
        "what is left on most ranks is empty.",
        _IN_SP + "BroadcastAddendSliced", _SP, "rewritten-raises", ("residual_shard*", "add*"), strategy="near-miss",
    ),
    Exhibit(
        "shard-returned-as-full",
        "The program returns a shard as if it were the whole tensor",
        SHARDS,
        "A residual that stayed local leaves the graph without being gathered. Whoever comes next, another pipeline stage "
        "for one, takes it for replicated.",
        _IN_SP + "LocalResidualReturned", _SP, "wrong-value", ("getitem*", "add*"), ("VLLM-24021",),
        strategy="structured",
    ),
    Exhibit(
        "scattered-along-another-dim",
        "Scattered along one dim, gathered along another",
        SHARDS,
        "[B, S, H] is scattered along the batch and gathered along the tokens. Where B and S are both divisible, every "
        "shape in between is plausible.",
        _IN_SP + "BatchScattered", _SP, "wrong-value", ("reduce_scatter*", "all_gather*"), strategy="structured",
    ),
    Exhibit(
        "gathered-in-rank-order",
        "Shards are put together in order of rank numbers",
        SHARDS,
        "The group is [1, 0], and shards are gathered as [0, 1]: the halves of the result change places. Sorting a group "
        "is what libraries do to be helpful.",
        _IN_SP + "GatherOrderLost", _SP, "wrong-value", ("all_gather*",), strategy="structured",
    ),
    Exhibit(
        "view-merges-shards",
        "A view merges dims of which one is divided",
        SHARDS,
        "[B, S, H] on shards of S is viewed as [B · S, H]: each rank's rows are no longer one piece of the whole. The "
        "number of elements fits, so the view succeeds.",
        _IN_SP + "ViewMergesTokens", _SP, "wrong-value", ("view*", "all_gather*"), strategy="near-miss",
    ),
    Exhibit(
        "norm-over-a-shard",
        "A norm reduces over this rank's part of the hidden dim",
        SHARDS,
        "A norm moves in front of the gather of the dim it reduces over, so each rank divides by the mean square of its own "
        "part. The parts have similar statistics, so the result is nearly right: a loss curve does not show it.",
        _FOREIGN + "NormOverShard", _FOREIGN + "NormBelowGather", "wrong-value", ("rms_norm*",), strategy="wild",
    ),
    Exhibit(
        "reshaped-instead-of-transposed",
        "The way back from a transposed scatter is a reshape",
        SHARDS,
        "A reduce_scatter along an inner dim runs along dim 0 of the transposed tensor; then a reshape restores the shape, "
        "but not the order of elements. With equal sizes and symmetric test data it passes.",
        _FOREIGN + "TransposeByReshape", _FOREIGN + "ScatterFirstDim", "wrong-value", ("reshape*",), ("PT-153595",),
        strategy="wild",
    ),
    Exhibit(
        "indivisible-size-scattered",
        "A size that the group does not divide is scattered",
        SHARDS,
        "Three tokens on two ranks. The pass does not ask, and fails while compiling; one that pads or floors in silence "
        "would lose a token.",
        _IN_SP + "IndivisibleTokensAccepted", _SP, "pass-raised", strategy="structured",
    ),
    # --------------------------------------------------------------------------------------- collectives and groups
    Exhibit(
        "world-instead-of-subgroup",
        "A fused collective runs over all ranks in place of its subgroup",
        COLLECTIVES,
        "The fused matmul and all_reduce is emitted on the default group. With one tensor-parallel group that is the right "
        "one; beside a data-parallel dim it adds up the results of different batches.",
        _FOREIGN + "FusedOverWorld", _FOREIGN + "FuseMatmul", "wrong-value", ("matmul_all_reduce*",), ("VLLM-45917",),
        world_size=4, options={"world_size": 4}, strategy="structured",
    ),
    Exhibit(
        "gathered-over-another-group",
        "What one group scattered, another gathers",
        COLLECTIVES,
        "All gathers use the group of the graph's first collective. On a mesh of two dims with equal sizes every shape "
        "fits, and ranks get the shards of others.",
        _IN_SP + "GatherOverFirstGroup", _SP, "wrong-value", ("all_gather*",), ("VLLM-45917",),
        strategy="near-miss", world_size=4,
    ),
    Exhibit(
        "bucket-over-two-groups",
        "Collectives of two groups share a bucket",
        COLLECTIVES,
        "The key of a bucket lacks the group, so the second member is summed over the group of the first. Nothing hangs: "
        "all ranks agree on the wrong group.",
        _FOREIGN + "BucketOfAllGroups", _FOREIGN + "Bucket", "wrong-value", ("all_reduce_default*", "clone*"),
        ("PT-158632",), world_size=4,
    ),
    Exhibit(
        "bucket-of-two-kinds",
        "A reduce_scatter shares a bucket with an all_reduce",
        COLLECTIVES,
        "The key of a bucket lacks the kind of collective. The bucket is all-reduced, and every rank takes the first chunk "
        "for its own: the first rank of each group is right.",
        _FOREIGN + "BucketOfAllKinds", _FOREIGN + "Bucket", "wrong-value", ("slice*", "reshape*", "clone*"),
        ("PT-175150",), strategy="wild",
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
        _FOREIGN + "CollectiveErased", _FOREIGN + "EraseUnread", "deadlock", ("all_reduce*",), ("PT-131023",),
        made=programs.collective_read_on_one_rank,
    ),
    Exhibit(
        "ranks-disagree-on-a-collective",
        "One rank scatters where another still reduces",
        COLLECTIVES,
        "A rewrite leaves a useless all_reduce behind on all ranks but one. On that one the next collective of the group "
        "meets it: with equal sizes some backends exchange garbage in place of hanging.",
        _IN_SP + "AllReduceErasedOnFirstRank", _SP, "collective-mismatch", ("all_reduce*", "reduce_scatter*"),
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
    # -------------------------------------------------------------------------------------------------- ops of one rank
    Exhibit(
        "argument-dropped-by-fusion",
        "A fused op has no place for an argument, and drops it",
        LOCAL,
        "`add(x, y, alpha=2)` becomes part of add_rms_norm, which knows no alpha. The default is what nearly every graph "
        "has, so the fusion is right nearly always.",
        _LOCAL + "AlphaDropped", _LOCAL + "FuseNorm", "wrong-value", ("add_rms_norm*",), made=programs.sum_with_alpha,
    ),
    Exhibit(
        "results-swapped",
        "Two results of one op change places",
        LOCAL,
        "A fused norm returns the norm and the sum; taken apart, they are handed out the other way round. Both have the "
        "same shape and dtype.",
        _LOCAL + "ResultsSwapped", _LOCAL + "SplitNorm", "wrong-value", ("add_tensor*", "rms_norm_default*"),
        strategy="structured",
    ),
    Exhibit(
        "eps-by-default",
        "A norm gets the usual eps in place of its own",
        LOCAL,
        "The pass writes 1e-6 where the graph said 1e-5 or 1e-3. For activations of size one the difference hides in the "
        "rounding of bfloat16; for small ones it does not.",
        _LOCAL + "DefaultEps", _LOCAL + "SplitNorm", "wrong-value", ("rms_norm_default*",), strategy="structured",
    ),
    Exhibit(
        "variance-of-a-sample",
        "A layer norm divides by n − 1",
        LOCAL,
        "Taken apart, a layer norm calls `var`, which corrects for the mean unless told not to. With 4096 channels the "
        "result is off by one part in 8000.",
        _LOCAL + "VarianceOfSample", _LOCAL + "SplitLayerNorm", "wrong-value", ("var*",), strategy="wild",
    ),
    # ----------------------------------------------------------------------------------------------- storage and writes
    Exhibit(
        "written-while-read",
        "An op reuses the tensor of an operand that others still read",
        STORAGE,
        "relu(x) becomes relu_(x) although x has a later reader, or is returned. On one rank and stream the order decides "
        "who sees what; planners of buffers make the same mistake with reuse.",
        _LOCAL + "WrittenWhileRead", _LOCAL + "ReuseOperand", "wrong-value",
        ("relu*", "add*", "mul*", "neg*"), ("PT-108811", "NVF-4895"),
    ),
    Exhibit(
        "input-overwritten",
        "The caller's input is overwritten",
        STORAGE,
        "An op in place takes an input for a tensor of the graph's own. The first iteration is right; the second one starts "
        "from what the first has left.",
        _LOCAL + "InputOverwritten", _LOCAL + "ReuseOperand", "wrong-value", ("relu*", "add*", "mul*", "neg*"),
    ),
    Exhibit(
        "write-erased-as-dead",
        "A write into an input is erased as dead code",
        STORAGE,
        "Nobody reads the result of `copy_`, so it goes. What the caller finds in its tensor is the old value: a cache "
        "that is never filled.",
        _FOREIGN + "WriteErased", _FOREIGN + "EraseUnread", "wrong-value",
    ),
    Exhibit(
        "merged-across-a-write",
        "Equal calls in front of and behind a write become one",
        STORAGE,
        "Two calls with the same arguments are taken for the same value, but something has written into the argument in "
        "between. Graphs without mutation never show it.",
        _LOCAL + "MergedAcrossWrite", _LOCAL + "MergeEqualCalls", "wrong-value", ("sub*",),
        made=programs.read_around_a_write,
    ),
    Exhibit(
        "copy-dropped",
        "A copy is dropped that keeps an old value",
        STORAGE,
        "A clone looks like the identity, and is, until its source is written into.",
        _LOCAL + "CopyDropped", _LOCAL + "DropCopies", "wrong-value", ("sub*",), made=programs.copied_before_a_write,
    ),
    Exhibit(
        "results-share-storage",
        "Two results that were apart share one tensor",
        STORAGE,
        "Equal results are merged, and the program returns one tensor twice. Values are right, until the caller writes "
        "into one of them.",
        _LOCAL + "ReturnedAsOne", _LOCAL + "MergeEqualCalls", "wrong-alias", ("neg*",), made=programs.equal_results,
    ),
    Exhibit(
        "operand-gated-by-a-copy",
        "An op writes into a copy of what it should write into",
        STORAGE,
        "To make an op wait, its operand goes through an anchor, which hands on a copy. For an op in place that is the "
        "end of the write: the original tensor never changes.",
        _IN_MS + "WrittenOperandGated", _MS, "wrong-value",
        _WRITES, strategy="overlap",
    ),
    # ----------------------------------------------------------------------------------------------- graphs and metadata
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
        _FOREIGN + "BucketAtFirstMember", _FOREIGN + "Bucket", "malformed-graph", ("reshape_default*",), ("PT-158663",),
    ),
    Exhibit(
        "node-of-another-graph",
        "A node reads one of the graph that was left behind",
        GRAPHS,
        "A graph is copied call by call, and one that was left out has readers that nobody redirected. FX notices only "
        "when it checks the graph, or writes code that names a variable which does not exist.",
        _LOCAL + "StrayNode", _LOCAL + "Rebuild", "malformed-graph", (), ("PT-175812-3",), strategy="structured",
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
    # ------------------------------------------------------------------------------------------------- order of streams
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
        "join-erased-as-dead",
        "The waits of the output are erased as dead code",
        STREAMS,
        "Values that nobody reads made the output wait; dead-code elimination took them away, and the waiting with them.",
        _IN_MS + "JoinErasedAsDead", _MS, "race", _is_returned, strategy="overlap",
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
        f"{_SP}+{_IN_MS}TokenSharedByCollectives", f"{_SP}+{_MS}", "race", lambda node: _reads_a_collective(node) or _is_returned(node), ("MG-1810",),
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
        "gate-behind-a-view",
        "What is gated is the value that a view shows",
        STREAMS,
        "A view is no op that a stream could run, so the wait in front of it binds whatever comes next.",
        _IN_MS + "GateBehindAView", _MS, "anchor-mismatch", _reads_a_view, strategy="overlap",
    ),
    # --------------------------------------------------------------------------------------------------------- schedules
    Exhibit(
        "makespan-of-another-order",
        "The schedule declares the time of an order that it does not have",
        TIME,
        "The graph was reordered after its time had been computed. Whoever compares schedules by what they declare picks "
        "the wrong one.",
        _IN_MS + "OldMakespanDeclared", _MS, "wrong-schedule", ("output",), strategy="overlap", world_size=4,
    ),
    Exhibit(
        "overhead-forgotten",
        "Synchronisation is taken to cost nothing",
        TIME,
        "The plan spreads small ops over streams because waiting is free in it. On a device it is not.",
        _IN_MS + "OverheadForgotten", _MS, "wrong-schedule", ("output",), strategy="overlap", world_size=4,
    ),
    Exhibit(
        "no-gain",
        "A schedule that is no faster than running op after op",
        TIME,
        "The graph is lowered to streams although the plan says that nothing is gained: all of the risk for none of the "
        "time.",
        _IN_MS + "NoGuard", _MS, "no-gain", ("output",), strategy="overlap",
    ),
    # ------------------------------------------------------------------------------------------------ hidden by rounding
    Exhibit(
        "eps-of-the-last-digit",
        "eps is the next number",
        ROUNDING,
        "The eps of a norm lost its last digit on its way through a decimal. The values change by less than floating point "
        "can hold, so no comparison of floating-point results tells a copied eps from another one.",
        _TINY + "EpsLastDigit", _LOCAL + "SplitNorm", "wrong-value", ("rms_norm_default*",), domain="exact",
    ),
    Exhibit(
        "residual-hardly-scaled",
        "Two scales that should cancel leave 1 + 2⁻⁴⁸",
        ROUNDING,
        "A residual is scaled and scaled back, and is not quite what it was. The difference is as large as the rounding of "
        "a dozen ops, and is there in every layer.",
        _TINY + "ResidualHardlyScaled", _LOCAL + "FuseNorm", "wrong-value", ("mul_tensor*", "add_rms_norm*"),
        domain="exact",
    ),
    Exhibit(
        "reciprocal-of-fifteen-digits",
        "A mean is a product with a decimal of fifteen digits",
        ROUNDING,
        "The reciprocal of the count goes into the graph as text that does not give the same number back. For counts "
        "that are powers of two it does.",
        _TINY + "ReciprocalOfFifteenDigits", _TINY + "SplitMean", "wrong-value", ("mul_tensor*",), domain="exact",
        made=programs.mean_of_six,
    ),
    Exhibit(
        "contribution-hardly-scaled",
        "One rank's addend is too large by 2⁻⁴⁸ of it",
        ROUNDING,
        "The first rank scales what it adds, to keep sums small, and nobody scales back exactly. Reordered sums differ by "
        "about as much.",
        _TINY + "ContributionScaled", _FOREIGN + "ReduceByGather", "wrong-value", ("mul_tensor*",), domain="exact",
        strategy="structured",
    ),
    Exhibit(
        "weight-hardly-shrunk",
        "The weight of a norm is too small by 2⁻⁴⁸ of it",
        ROUNDING,
        "A factor was folded into the weight and rounded there.",
        _TINY + "WeightShrunk", "tcverify.passes.identity:Identity", "wrong-value", ("mul_tensor*",), domain="exact",
        strategy="structured",
    ),
    Exhibit(
        "guard-added-to-a-sum",
        "10⁻¹⁵ is added so that nothing divides by zero",
        ROUNDING,
        "A number that is too small to matter is added to every sum over ranks. It does not matter, until everything else "
        "is zero.",
        _TINY + "GuardedSum", "tcverify.passes.identity:Identity", "wrong-value", ("add_tensor*",), domain="exact",
        strategy="structured",
    ),
    Exhibit(
        "summed-in-bfloat16",
        "Addends are rounded to bfloat16 before they are summed",
        ROUNDING,
        "Half the traffic, and eight bits of every addend: the sum of several ranks is worse than any one of them. Every "
        "dtype in the graph is consistent, and in wider arithmetic all is well.",
        _TINY + "SummedInBfloat16", "tcverify.passes.identity:Identity", "wrong-value",
        ("_to_copy_default*", "all_reduce_default*"), domain="native", strategy="structured",
    ),
)  # fmt: skip
