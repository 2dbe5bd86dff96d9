"""The check of metadata, on graphs that ranks share."""

from __future__ import annotations

from tests.support.lowered import judge, program


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
