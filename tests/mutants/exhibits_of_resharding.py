"""Exhibits of the gallery: programs whose tensors lie on meshes of their own, lowered to communication, streams and memory."""

from __future__ import annotations

from tests.mutants.exhibits import Exhibit

_SOUND = "tcverify.passes.resharding.host_program:HostProgram"
_LOWERING, _STREAMS, _MEMORY = (
    f"tests.mutants.{name}:" for name in ("resharding", "resharding_streams", "resharding_memory")
)

ACROSS, WORKERS = "resharding", "host programs on streams"

RESHARDING: tuple[Exhibit, ...] = (
    Exhibit(
        "mesh-order-lost-in-the-group",
        "The shards of mesh [1, 0] come together in the order of rank numbers",
        ACROSS,
        "A process group sorts its ranks, a mesh does not. On meshes that happen to be in order all is well; on any other the "
        "chunks change places, and every shape is right.",
        _LOWERING + "TeamSorted", _SOUND, "wrong-value", ("all_gather*", "reduce_scatter*", "all_to_all*"),
        strategy="resharding", world_size=4,
    ),
    Exhibit(
        "max-with-the-smallest-positive-number",
        "The root of a maximum, which has no addend of its own, gives the smallest positive number",
        ACROSS,
        "What is called the least value of a floating-point type is its smallest positive one. Whoever stands outside of the "
        "senders gives it as what changes nothing; where all values are negative it wins.",
        _LOWERING + "SmallestPositiveIsTheIdentity", _SOUND, "wrong-value", ("full*",),
        strategy="resharding", world_size=4,
    ),
    Exhibit(
        "no-gather-for-one-receiver",
        "Of several ranks that shall have the whole, the last one gets nothing",
        ACROSS,
        "Shards go to another mesh by one gather for each receiver. One is left out on all ranks alike, so that nobody waits "
        "for anybody; the receiver reads what its allocation happens to hold.",
        _LOWERING + "NoGatherForTheLastReceiver", _SOUND, "wrong-value", ("empty*",),
        strategy="resharding", world_size=4,
    ),
    Exhibit(
        "worker-ahead-of-the-caller",
        "Workers begin before the caller's stream has made what they read",
        WORKERS,
        "The loop that lets every worker wait for the caller's stream is missing. The host runs through the steps in order, "
        "and whoever tests on one stream, or with little before the loop, sees right results.",
        _STREAMS + "NoInitialSync", _SOUND, "race", strategy="resharding", world_size=2,
    ),
    Exhibit(
        "last-worker-not-joined",
        "The caller's stream reads a result of which the last worker still computes a part",
        WORKERS,
        "Workers are joined round by round. Where the trips are no multiple of the workers, the last round is shorter, and its "
        "last worker is not waited for.",
        _STREAMS + "LastWorkerNotJoined", _SOUND, "race", strategy="resharding", world_size=2,
    ),
    Exhibit(
        "freed-behind-the-post",
        "What a communication reads is freed as soon as it is posted",
        WORKERS,
        "The post is the last op that names the operand, and counts as its last use. It is read until the wait: the allocator "
        "hands the memory to the next one while it is still being sent.",
        _MEMORY + "FreedAtThePost", _SOUND, "async-race", ("deallocate*",), ("DS-7965",),
        strategy="resharding", world_size=2,
    ),
)  # fmt: skip
