"""The check of memory on host IR: deallocations that hurt, and what is never freed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.host_programs import Host, found, kinds


def freeing(b: Host, *extra: str, keep: bool = False) -> Any:
    """Gathers what it makes and frees all but the result; `extra` frees more, or uses what is freed."""
    made = b.relu(b.x)
    gathered = b.gather(made, b.empty(8, 4))
    b.wait(gathered)
    view = b.part(gathered, 0)
    result = b.relu(view)
    if not keep:
        b.free(made)
    b.free(view if "view" in extra else gathered)
    if "use" in extra:
        b.put(made, b.x)
    if "twice" in extra:
        b.free(b.part(gathered, 1))
    if "input" in extra:
        b.free(b.part(b.y, 0))
    if "output" in extra:
        b.free(result)
    return result


@pytest.mark.parametrize("extra", [(), ("view",)])
def test_sound_deallocations(extra: tuple[str, ...]) -> None:
    assert kinds(lambda b: freeing(b, *extra), deallocation=True, streams=1) == []


@pytest.mark.parametrize(
    ("extra", "kind", "title"),
    [
        ("use", "use-after-free", "'copy_' writes into 'relu' after 'deallocate' has freed it"),
        ("twice", "double-free", "'deallocate_2' frees 'empty', which 'deallocate_1' has freed already"),
        ("input", "freed-input", "'deallocate_2' frees input 'y', which belongs to the caller"),
        ("output", "freed-output", "'deallocate_2' frees 'relu_1', which the graph returns"),
    ],
)
def test_deallocations_that_hurt(extra: str, kind: str, title: str) -> None:
    finding = found(lambda b: freeing(b, extra), deallocation=True, streams=1)
    assert (finding.kind, finding.check, finding.title) == (kind, "memory", title)


def test_what_is_made_is_freed_where_that_is_promised() -> None:
    finding = found(lambda b: freeing(b, keep=True), deallocation=True)
    assert (finding.kind, finding.node, finding.rank) == ("leak", "relu", 0)
    assert finding.title == "'relu' is never freed: 64 bytes"
    assert "'all_gather' uses it last" in finding.detail
    assert kinds(lambda b: freeing(b, keep=True)) == []


def test_what_nobody_reads_is_freed_too() -> None:
    def build(b: Host, *, free: bool) -> Any:
        unread = b.mm(b.x)
        if free:
            b.free(unread)
        b.current()
        return b.relu(b.x)

    assert kinds(lambda b: build(b, free=True), deallocation=True) == []
    finding = found(lambda b: build(b, free=False), deallocation=True)
    assert (finding.kind, finding.node) == ("leak", "mm")
    assert "it is never used" in finding.detail


def test_views_inputs_outputs_and_empty_tensors_are_not_freed() -> None:
    def build(b: Host) -> Any:
        b.part(b.x, 0)
        sent = b.post("gather", b.x, 0, 0, [0, 1], out=b.empty(8, 4) if b.me == 0 else None)
        b.wait(sent)
        b.empty(0, 4)
        return (sent if b.me == 0 else b.x), b.part(b.relu(b.x), 0)

    assert kinds(build, deallocation=True) == []


def test_a_graph_that_promises_to_free_is_looked_at_although_it_frees_nothing() -> None:
    finding = found(lambda b: (b.mm(b.x), b.relu(b.x))[1], "memory", deallocation=True)
    assert finding.kind == "leak"
