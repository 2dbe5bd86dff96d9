"""Exhibits of the gallery: sums over ranks, shards, ops of one rank, storage, and what rounding hides."""

from __future__ import annotations

from tests.mutants import exhibit_programs as programs
from tests.mutants.exhibits import Exhibit

_SP, _MS = "tcverify.passes.sequence_parallel:SequenceParallel", "tcverify.passes.multistream:Multistream"
_IDENTITY = "tcverify.passes.identity:Identity"
_IN_SP, _IN_MS, _FOREIGN, _GROUPS, _LOCAL, _TINY = (
    f"tests.mutants.{name}:"
    for name in ("sequence_parallel", "multistream", "foreign", "foreign_groups", "foreign_local", "tiny")
)

SUMS, SHARDS, LOCAL = "sums over ranks", "shards and placements", "ops of one rank"
STORAGE, ROUNDING = "storage and writes", "hidden by rounding"

_WRITES = ("add_", "add__[0-9]*", "mul_", "mul__[0-9]*", "copy_", "copy__[0-9]*")

VALUES: tuple[Exhibit, ...] = (
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
        "residual-added-twice",
        "The residual is added by the sum and again by the norm",
        SUMS,
        "A rewrite turns the norm behind a residual sum into one that adds the residual itself, and leaves the sum. All "
        "shapes fit; with a small residual the model only gets a little worse.",
        _IN_SP + "ResidualAddedTwice", _SP, "wrong-value", ("rms_norm*",), strategy="structured",
    ),
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
        _IN_SP + "VaryingAddendSliced", _SP, "wrong-value", ("residual_shard*",), ("VLLM-24021",),
        strategy="near-miss",
    ),
    Exhibit(
        "shard-returned-as-full",
        "The program returns a shard as if it were the whole tensor",
        SHARDS,
        "A residual that stayed local leaves the graph without being gathered. Whoever comes next, another pipeline stage "
        "for one, takes it for replicated.",
        _IN_SP + "LocalResidualReturned", _SP, "wrong-value", ("getitem*", "add", "add_[0-9]*"), ("VLLM-24021",),
        strategy="structured",
    ),
    Exhibit(
        "gathered-along-another-dim",
        "Scattered along one dim, gathered along another",
        SHARDS,
        "[B, S, H] is scattered along the tokens and gathered along the batch. Where B and S are both divisible, every "
        "shape in between is plausible.",
        _IN_SP + "BatchGathered", _SP, "wrong-value", ("all_gather*",), strategy="structured",
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
        _IN_SP + "ViewMergesTokens", _SP, "wrong-value", ("view*",), strategy="near-miss",
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
        _LOCAL + "DefaultEps", _LOCAL + "FuseNorm", "wrong-value", ("add_rms_norm*",), strategy="structured",
    ),
    Exhibit(
        "variance-of-a-sample",
        "A layer norm divides by n − 1",
        LOCAL,
        "Taken apart, a layer norm calls `var`, which corrects for the mean unless told not to. With 4096 channels the "
        "result is off by one part in 8000.",
        _LOCAL + "VarianceOfSample", _LOCAL + "SplitLayerNorm", "wrong-value", ("var*",), strategy="wild",
    ),
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
        _GROUPS + "WriteErased", _GROUPS + "EraseUnread", "wrong-value",
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
)  # fmt: skip

#: What float64 does not show: the exact domain does, or arithmetic in the program's own dtypes for the last two.
HIDDEN: tuple[Exhibit, ...] = (
    Exhibit(
        "eps-of-the-last-digit",
        "eps is the next number",
        ROUNDING,
        "The eps of a norm lost its last digit on its way through a decimal. The values change by less than floating point "
        "can hold, so no comparison of floating-point results tells a copied eps from another one.",
        _TINY + "EpsLastDigit", _LOCAL + "FuseNorm", "wrong-value", ("add_rms_norm_default*",), domain="exact",
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
        _TINY + "WeightShrunk", _IDENTITY, "wrong-value", ("mul_tensor*",), domain="exact",
        strategy="structured",
    ),
    Exhibit(
        "bucket-in-the-first-dtype",
        "A bucket rounds its members to the dtype of the first",
        ROUNDING,
        "Collectives of two dtypes share a bucket, in the dtype of whichever came first. Behind it every member has its own "
        "dtype again, so nothing in the graph tells that digits are gone.",
        _GROUPS + "BucketOfAllDtypes", _GROUPS + "Bucket", "wrong-value", ("_to_copy_default*",), ("PT-167853",),
        domain="native", made=programs.sums_of_two_dtypes,
    ),
    Exhibit(
        "summed-in-bfloat16",
        "Addends are rounded to bfloat16 before they are summed",
        ROUNDING,
        "Half the traffic, and eight bits of every addend: the sum of several ranks is worse than any one of them. Every "
        "dtype in the graph is consistent, and in wider arithmetic all is well.",
        _TINY + "SummedInBfloat16", _IDENTITY, "wrong-value",
        ("_to_copy_default*", "all_reduce_default*"), domain="native", strategy="structured",
    ),
)  # fmt: skip
