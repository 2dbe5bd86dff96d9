"""Exhibits of the gallery: asynchronous collectives, what moves around them, and the buffers that they use."""

from __future__ import annotations

from torch import fx

from tcverify.ops import lookup
from tests.mutants import exhibit_programs as programs
from tests.mutants.exhibits import Exhibit

_REORDERING, _SINKING, _PARAMS, _BUFFERS = (
    f"tcverify.passes.{name}"
    for name in (
        "overlap.reordering:", "overlap.iterative_sinking:SinkWaitsIterative",
        "overlap.fsdp_params:RemoveFsdp2UnshardedParamGraphInputUsage", "comm_buffers:CommBuffers",
    )
)  # fmt: skip
_IN_OVERLAP, _IN_MEMORY, _IN_FSDP, _IN_BUFFERS = (
    f"tests.mutants.{name}:" for name in ("overlap", "overlap_memory", "overlap_fsdp", "comm_buffers")
)

UNDER_WAY, MEMORY = "asynchronous collectives", "memory and buffers"


def _meets_others(node: fx.Node) -> bool:
    """What ranks meet in: an op with an effect, or a collective."""
    op = lookup(node.target)
    return op.effect or (op.collective and op.phase != "wait")


def _has_a_place(node: fx.Node) -> bool:
    return "comm_buffer" in node.meta


ASYNCHRONY: tuple[Exhibit, ...] = (
    Exhibit(
        "written-while-a-collective-reads",
        "A write goes before the wait of the collective that still reads what it overwrites",
        UNDER_WAY,
        "The collective has been started, so that its operand looks read. It is read until the wait: what a write in "
        "between leaves there may be what the others receive.",
        _IN_OVERLAP + "WriteDuringReadAllowed", _REORDERING + "SinkWaits", "async-race", ("add_", "mul_", "copy_"),
        seen_in=("PT-112439",), strategy="functional",
    ),
    Exhibit(
        "freed-while-a-collective-reads",
        "The operand of a collective is freed before the collective has completed",
        UNDER_WAY,
        "Freeing does not wait for those who read. The allocator hands the memory to the next one who asks, while it is "
        "still being sent.",
        _IN_OVERLAP + "FreeBeforeCompletion", _REORDERING + "SinkWaits", "async-race", ("resize_storage_bytes_*",),
        seen_in=("DS-7965",), made=programs.freed_behind_a_wait,
    ),
    Exhibit(
        "view-of-an-erased-wait",
        "A view of a result shows a wait that is no longer there",
        UNDER_WAY,
        "A wait was made anew at its new place and replaced where ops read it. Views were taken to be no readers, and name "
        "a value that nobody makes.",
        _IN_OVERLAP + "ViewsOfErasedWaits", _REORDERING + "SinkWaits", "malformed-graph", ("view*", "slice*"),
        seen_in=("PT-118802",), strategy="functional",
    ),
    Exhibit(
        "send-overtaken-by-a-collective",
        "A collective starts before a send that stood before it",
        UNDER_WAY,
        "Communication is told by a list of ops, and what is not on it counts as compute. Ranks that send and ranks that "
        "receive then wait for each other.",
        _IN_OVERLAP + "EffectsAreCompute", _REORDERING + "RaiseComms", "deadlock", _meets_others,
        seen_in=("PT-189454",), strategy="functional",
    ),
    Exhibit(
        "freed-by-the-former-last-user",
        "The node that read a value last still frees it after it has changed places",
        MEMORY,
        "Peak memory is kept up to date while nodes move. Two nodes read one value and change places; the one that was the "
        "last is still taken to free it, and the peak comes out too low.",
        _IN_MEMORY + "LastUserStays", _SINKING, "peak-memory", seen_in=("PT-160113",), strategy="functional",
    ),
    Exhibit(
        "buffer-dead-at-the-wait",
        "A communication buffer is used again while the result in it is still read",
        MEMORY,
        "The all_reduce works in place, so that its result lives in the buffer. Readers name the waited value, not the "
        "buffer, and the plan takes that to be free from the wait on.",
        _IN_BUFFERS + "FreesAtTheWait", _BUFFERS, "overlapping-buffers", _has_a_place,
        ("PT-108811",), strategy="functional",
    ),
    Exhibit(
        "buffer-dead-at-the-start",
        "Two operands of collectives that are under way together lie in the same bytes",
        MEMORY,
        "A place is taken to be free when its collective has been started. The next operand is written there while the "
        "first is still being read.",
        _IN_BUFFERS + "FreesAtTheStart", _BUFFERS, "overlapping-buffers", _has_a_place,
        ("DS-7965",), strategy="functional",
    ),
    Exhibit(
        "copy-beyond-its-interval",
        "What was gathered for the first layer is used in the second",
        MEMORY,
        "Two layers share an unsharded parameter, into which each copies before it runs. The copies are removed, and all "
        "uses are given what the first one has copied.",
        _IN_FSDP + "CopyBeyondItsInterval", _PARAMS, "wrong-value", ("sin*",), made=programs.parameter_copied_twice,
    ),
)  # fmt: skip
