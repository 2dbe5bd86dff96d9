"""The check of metadata, on graphs that ranks share."""

from __future__ import annotations

import torch
from torch import fx

from tcverify.program.finding import Finding
from tests.support.lowered import Lowering, judge, program


def test_nodes_with_rank_constants_are_judged_on_every_rank() -> None:
    original = program(lambda b: b.relu(b.x))

    def cut(*ends: int) -> list[tuple[int | None, str]]:
        rewritten = program(
            lambda b: b.call("aten::slice.Tensor", b.x, 0, 0, b.constant("end", lambda rank: ends[rank]))
        )
        return [(found.rank, found.title) for found in judge("metadata", rewritten, original=original)]

    assert cut(2, 2) == []
    says = "meta['val'] of 'slice_1' says float32[2, 4], but the node produces float32[3, 4]"
    assert cut(2, 3) == [(1, says)]


def test_an_output_of_another_dtype_is_refuted_whatever_is_recorded_and_promised() -> None:
    original = program(lambda b: [b.relu(b.x), b.x])

    def retyped(b: Lowering) -> list[fx.Node]:
        wide = b.call("aten::to.dtype", b.relu(b.x), torch.bfloat16)
        wide.meta["val"] = b.x.meta["val"]  # copied from what it stands for, as passes do it
        return [wide, b.x]

    for promises in ({}, {"metadata": True}, {"metadata": False}):
        found = judge("metadata", program(retyped), original=original, **promises)
        wrong = [
            (one.kind, one.title, one.node) for one in found if isinstance(one, Finding) and one.severity == "error"
        ]
        assert ("changed-signature", "output 0 is bfloat16 after the pass, not float32", "to") in wrong


def test_values_in_between_may_have_another_dtype() -> None:
    def there_and_back(b: Lowering) -> fx.Node:
        return b.call("aten::to.dtype", b.call("aten::to.dtype", b.relu(b.x), torch.float64), torch.float32)

    original = program(lambda b: b.relu(b.x))
    for promises in ({}, {"metadata": True}, {"metadata": False}):
        assert judge("metadata", program(there_and_back), original=original, **promises) == []
