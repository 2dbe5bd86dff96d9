"""Options of the multistream pass: streams, overhead, device; what goes before what, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tcverify.cost import load_device_profile, node_cost
from tcverify.errors import ProgramError, UsageError
from tcverify.passes import BUILTIN, DESCRIPTIONS, Multistream, disable_passes
from tcverify.program import StreamSettings
from tcverify.verification.verifier import verify
from tests.support.stream_programs import US, Builder, check, findings, is_lowered, judge, lowered, node, program


def overlapping(b: Builder) -> Any:
    return b.add(b.all_reduce(b["x"]), b.mm(b.mm(b["v"])))


def test_it_is_built_in() -> None:
    assert isinstance(BUILTIN["multistream"](), Multistream)
    assert "streams" in DESCRIPTIONS["multistream"]
    assert Multistream.options() == ["device", "dump", "enabled", "streams", "sync_overhead_s"]
    assert (Multistream.contract.schedule, Multistream.contract.idempotent) == (True, True)


def test_options_go_before_what_the_program_says() -> None:
    original = program(overlapping, streams=StreamSettings((0,), (1,), US))
    pass_ = Multistream(streams="comm=4+5")
    graph = lowered(original, pass_)
    assert node(graph, "all_reduce_record").args[1] == 4
    assert pass_.settings == StreamSettings((0,), (4, 5), US)


def test_the_program_goes_before_the_defaults() -> None:
    pass_ = Multistream()
    lowered(program(overlapping, streams=StreamSettings((2,), (3,))), pass_)
    assert pass_.settings.compute == (2,)
    lowered(program(overlapping), pass_)
    assert pass_.settings == StreamSettings()


def test_streams_of_both_roles() -> None:
    original = program(overlapping)
    judged = judge(original, check(original, Multistream(streams=" compute=7 , comm=0+3")).graph(0))
    assert {op.node.name: op.stream for op in judged.ops}["mm"] == 7


def test_costs_are_estimated_for_a_device() -> None:
    original = program(lambda b: (b.all_reduce(b["x"]), b.mm(b["v"])), size=256, cost=lambda op: None)
    assert not is_lowered(lowered(original))
    pass_ = Multistream(device="h100-sxm")
    graph = check(original, pass_).graph(0)
    plain = original.graph(0)
    for name in ("all_reduce", "mm"):
        expected = node_cost(node(plain, name), load_device_profile("h100-sxm"))
        assert node(graph, name).meta["cost_s"] == expected


def test_the_device_of_the_program() -> None:
    original = program(
        lambda b: (b.all_reduce(b["x"]), b.mm(b["v"], cost=9.0)),
        cost=lambda op: None,
        streams=StreamSettings(device="a100-sxm-80gb"),
    )
    graph = check(original).graph(0)
    assert node(graph, "mm").meta["cost_s"] == 9 * US


def test_a_graph_without_costs_and_device_is_left_alone() -> None:
    original = program(overlapping, cost=lambda op: None)
    assert not is_lowered(lowered(original))
    assert findings(original) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"streams": "compute=0;comm=1"}, "option streams"),
        ({"streams": "compute"}, "option streams"),
        ({"streams": "compute="}, "option streams"),
        ({"streams": "copy=1"}, "option streams"),
        ({"streams": "comm=1,comm=2"}, "option streams"),
        ({"streams": "comm=-1"}, "option streams"),
        ({"streams": "comm=1+1"}, "name one twice"),
        ({"streams": "comm=99999999"}, "comm streams"),
        ({"sync_overhead_s": "soon"}, "option sync_overhead_s"),
        ({"sync_overhead_s": -1e-6}, "option sync_overhead_s"),
        ({"sync_overhead_s": "nan"}, "option sync_overhead_s"),
        ({"sync_overhead_s": True}, "option sync_overhead_s"),
        ({"sync_overhead_s": 10**400}, "option sync_overhead_s"),
        ({"device": "abacus"}, "abacus"),
        ({"device": 5}, "device 5"),
        ({"stream": "comm=1"}, "no option 'stream'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        Multistream(**options)
    assert caught.value.hint


def test_a_program_that_names_an_unknown_device_is_declined() -> None:
    """The program is to blame, not the pass."""
    original = program(overlapping, streams=StreamSettings(device="abacus"))
    verdict = verify(Multistream(), original)
    assert (verdict.status, verdict.findings) == ("inconclusive", [])
    assert "abacus" in verdict.doubts[0].detail
    assert verify(Multistream(device="l4"), original).status == "passed"


@pytest.mark.parametrize(
    "settings",
    [
        {"compute": [0]},
        {"comm": None},
        {"sync_overhead_s": "1"},
        {"sync_overhead_s": None},
        {"sync_overhead_s": True},
        {"sync_overhead_s": 10**400},
        {"device": 5},
    ],
)
def test_settings_of_another_type(settings: dict[str, Any]) -> None:
    with pytest.raises(ProgramError):
        StreamSettings(**settings)


def test_a_disabled_pass_touches_nothing(tmp_path: Path) -> None:
    original = program(overlapping)
    with disable_passes("multistream"):
        assert not is_lowered(lowered(original))
    assert not is_lowered(lowered(original, Multistream(enabled="false")))
    lowered(original, Multistream(dump=tmp_path))
    (dump,) = tmp_path.iterdir()
    assert "lowered: 1" in dump.read_text().splitlines()[0]


def test_the_overhead_that_a_program_states_goes_before_the_option() -> None:
    gm = program(lambda b: b.add(b.all_reduce(b["x"]), b.mm(b.mm(b["v"])))).graph_module(0)
    pass_ = Multistream(sync_overhead_s=1e-3)
    assert pass_.settings.sync_overhead_s == 1e-3
    gm.meta["streams"] = StreamSettings(sync_overhead_s=US)
    assert pass_(gm).graph.find_nodes(op="output")[0].meta["schedule"]["sync_overhead_s"] == US
