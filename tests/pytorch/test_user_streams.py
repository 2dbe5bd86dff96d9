"""The waits of code on several streams: where nothing keeps them in their place there is a race, and else nothing is found."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import pytest
from torch import fx

from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, spmd_program
from tcverify.pytorch import SUBJECTS
from tcverify.pytorch.streams import ORDERS
from tcverify.pytorch.user_streams import FORMS, UserStreams
from tcverify.strategies import DECODERS
from tcverify.verification.verifier import verify
from tests.pytorch.stream_ties import tie

if not SUBJECTS["user_streams"].here:
    pytest.skip("this torch ties no events to nodes", allow_module_level=True)
streams = importlib.import_module("torch._functorch._aot_autograd.streams")

TP2 = Mesh.grid({"tp": 2})
#: What ties events to the nodes around them.
TIES = "wrap_all_sync_nodes_with_control_deps"
X = InputSpec("x", (2, 2), placements=(("tp", VARYING),))
ALL = {name: tuple(values) for name, values in SUBJECTS["user_streams"].draws.items()}


def program(build: Any, **options: Any) -> Program:
    made = spmd_program(TP2, [X], lambda b: build(b, b.input("x")))
    return replace(made, options={"run": 1, "streams": 2, **options})


def one_reader(b: GraphBuilder, x: fx.Node) -> Any:
    return b.call("aten::neg", b.call("aten::relu", x))


def two_readers(b: GraphBuilder, x: fx.Node) -> Any:
    """On three streams, each reader has one of its own."""
    made = b.call("aten::relu", x)
    return [b.call("aten::neg", made), b.call("aten::abs", made)]


def view_behind_an_event(b: GraphBuilder, x: fx.Node) -> Any:
    """In runs of two nodes: a product and its view are on stream 1, and what reads the view is on stream 0."""
    before = b.call("aten::exp", b.call("aten::relu", x))
    return [b.call("aten::abs", b.call("aten::view", b.call("aten::neg", x), [4])), before]


def two_producers(b: GraphBuilder, x: fx.Node) -> Any:
    """On three streams, stream 0 reads what the others compute."""
    first = b.call("aten::neg", b.call("aten::relu", x))
    return b.call("aten::add.Tensor", first, b.call("aten::abs", x))


def current_stream_last(b: GraphBuilder, x: fx.Node) -> Any:
    """On three streams: stream 1 records an event, then the current one does."""
    made = b.call("aten::relu", x)
    aside = b.call("aten::exp", b.call("aten::neg", x))
    return [aside, b.call("tensor_cast::all_reduce", made, b.rank, b.group("tp"))]


def kinds(made: Program) -> set[str]:
    return {finding.kind for finding in verify(UserStreams(), made).findings}


@pytest.mark.parametrize(
    ("build", "options"),
    [
        (two_readers, {"streams": 3}),
        (view_behind_an_event, {"run": 2, "place": "apart"}),
        (two_producers, {"streams": 3, "annotated": "all", "events": "one", "order": "apart"}),
        (current_stream_last, {"streams": 3, "order": "early"}),
    ],
)
def test_what_torch_ties_to_nothing_is_a_race(
    monkeypatch: pytest.MonkeyPatch, build: Any, options: dict[str, Any]
) -> None:
    assert kinds(program(build, **options)) == {"race"}
    assert kinds(program(build, **{**options, "order": "traced"})) == set()
    monkeypatch.setattr(streams, TIES, tie)
    assert kinds(program(build, **options)) == set()


@pytest.mark.parametrize("form", FORMS)
def test_a_wait_that_is_tied_to_nothing_comes_too_late(monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    monkeypatch.setattr(streams, TIES, lambda _: None)
    assert kinds(program(one_reader, waits=form, order="late")) == {"race"}
    monkeypatch.setattr(streams, TIES, tie)
    assert kinds(program(one_reader, waits=form, order="late")) == set()


@pytest.mark.parametrize("order", ["traced", *ORDERS])
def test_where_every_event_keeps_its_place_nothing_is_found(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    monkeypatch.setattr(streams, TIES, tie)
    fired = 0
    decoder = DECODERS["wild"]
    for seed in range(60):
        made = decoder.decode(TP2, bytes((seed * 37 + k * 101) % 251 for k in range(decoder.width)))
        options = {name: values[seed * 7 % 11 % len(values)] for name, values in ALL.items()} | {"order": order}
        verdict = verify(UserStreams(), replace(made, options=options))
        assert not verdict.findings, verdict.findings
        fired += verdict.status == "passed" and verdict.changed
    assert fired > 20


@pytest.mark.parametrize("place", ALL["place"])
@pytest.mark.parametrize("events", ALL["events"])
def test_each_reader_waits_once(events: str, place: str) -> None:
    """Stream 1 reads twice what stream 0 computes, and waits for it once."""

    def build(b: GraphBuilder, x: fx.Node) -> Any:
        made = b.call("aten::exp", b.call("aten::relu", x))
        return b.call("aten::add.Tensor", b.call("aten::neg", made), made)

    gm = program(build, run=2, order="traced", events=events, place=place).graph_module(0)
    UserStreams()(gm)
    tokens = [len(node.args[2]) for node in gm.graph.nodes if "wait_and_bind" in str(node.target)]
    # relu, exp, neg; sum of two; and the current stream behind all
    assert tokens == [0, 0, 1, 0, 0, 1]
