"""The passes that ship with tcverify, by name."""

from collections.abc import Callable

from tcverify.passes.base import Pass, disabled
from tcverify.passes.identity import Identity
from tcverify.passes.sequence_parallel import SequenceParallel

#: What makes each built-in pass; options are keyword arguments.
BUILTIN: dict[str, Callable[..., Pass]] = {
    "sequence_parallel": SequenceParallel,
    "identity": Identity,
}

#: One line on each.
DESCRIPTIONS: dict[str, str] = {
    "sequence_parallel": "all_reduce → norm becomes reduce_scatter → norm on the shard → all_gather (pattern P1)",
    "identity": "changes nothing: what must never be refuted",
}

__all__ = ["BUILTIN", "DESCRIPTIONS", "Identity", "Pass", "SequenceParallel", "disabled"]
