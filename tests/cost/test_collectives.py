"""Times of collectives: hand-computed figures, the faster algorithm, and what must grow with what."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tcverify.cost import Interconnect, algorithm_times, collective_time
from tcverify.errors import InternalError

KINDS = (
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "permute", "broadcast", "gather", "scatter", "reduce",
    "send_recv", "reshard",
)  # fmt: skip
SWITCH = Interconnect("switch", 8, "clos", 1e9, 1e-6)  # a byte takes a nanosecond
MESH = Interconnect("mesh", 8, "full_mesh", 7e9, 1e-6)  # each of its links too
US = 1e-6


@pytest.mark.parametrize(
    ("kind", "members", "expected"),
    [
        # of 4,000 bytes: 4 µs on the wire
        ("send_recv", 2, {"direct": 5}),
        ("all_gather", 3, {"ring": 2 * 5}),
        ("all_gather", 4, {"ring": 3 * 5, "doubling": 2 + 3 * 4}),
        ("reduce_scatter", 4, {"ring": 3 * 2, "halving": 2 + 3}),
        ("all_reduce", 2, {"ring": 2 * 3, "halving": 2 + 4, "doubling": 5}),
        ("all_reduce", 4, {"ring": 6 * 2, "halving": 4 + 6, "doubling": 2 * 5}),
        ("all_reduce", 5, {"ring": 8 * 1.8, "doubling": (2 + 2) * 5}),
        ("all_to_all", 4, {"pairwise": 3 * 2, "bruck": 2 * 3}),
        ("all_to_all", 5, {"pairwise": 4 * 1.8, "bruck": 3 * 3}),
        ("permute", 4, {"direct": 5}),
        ("gather", 4, {"tree": 2 + 3 * 4}),
        ("gather", 5, {"tree": 3 + 4 * 4}),
        ("scatter", 4, {"tree": 2 + 3 * 4}),
        ("reduce", 4, {"tree": 2 * 5, "scattered": (2 + 3) + (2 + 3)}),
        ("reduce", 5, {"tree": 3 * 5, "scattered": 4 * 1.8 + 3 + 4 * 0.8}),
    ],
)
def test_times_on_a_switched_network(kind: str, members: int, expected: dict[str, float]) -> None:
    found = algorithm_times(kind, 4000, members, SWITCH)
    assert found == pytest.approx({name: us * US for name, us in expected.items()})
    assert collective_time(kind, 4000, members, SWITCH) == min(found.values())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("send_recv", {"direct": 5}),
        ("all_gather", {"direct": 5}),
        ("reduce_scatter", {"direct": 2}),
        ("all_reduce", {"direct": 4, "one-shot": 5}),
        ("all_to_all", {"direct": 2}),
        ("permute", {"direct": 5}),
        ("gather", {"direct": 5}),
        ("scatter", {"direct": 5}),
        ("reduce", {"direct": 5}),
    ],
)
def test_times_on_a_full_mesh(kind: str, expected: dict[str, float]) -> None:
    members = 2 if kind == "send_recv" else 4
    found = algorithm_times(kind, 4000, members, MESH)
    assert found == pytest.approx({name: us * US for name, us in expected.items()})


def test_more_members_than_the_mesh_has_places_go_round_in_a_ring() -> None:
    assert algorithm_times("all_gather", 7000, 9, MESH) == {"ring": pytest.approx(8 * (1 + 1) * US)}


def test_short_messages_go_in_few_steps_and_long_ones_in_small_pieces() -> None:
    def fastest(contribution: int, interconnect: Interconnect) -> str:
        times = algorithm_times("all_reduce", contribution, 6, interconnect)
        return min(times, key=lambda name: times[name])

    assert fastest(8, SWITCH) == "doubling"
    assert fastest(1 << 30, SWITCH) == "ring"
    assert fastest(8, MESH) == "one-shot"
    assert fastest(1 << 30, MESH) == "direct"


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_needs_no_time(kind: str) -> None:
    assert collective_time(kind, 1 << 20, 1, SWITCH) == 0.0


def test_an_unknown_kind_is_a_mistake_of_ours() -> None:
    with pytest.raises(InternalError, match="no time model of the collective 'gossip'"):
        collective_time("gossip", 1, 2, SWITCH)


@settings(deadline=None)
@given(
    st.sampled_from(KINDS),
    st.integers(0, 1 << 34),
    st.integers(0, 1 << 34),
    st.integers(2, 300),
    st.sampled_from([SWITCH, MESH]),
)
def test_more_bytes_never_take_less_time(kind: str, a: int, b: int, members: int, interconnect: Interconnect) -> None:
    small, large = sorted((a, b))
    assert collective_time(kind, small, members, interconnect) <= collective_time(kind, large, members, interconnect)


@settings(deadline=None)
@given(st.sampled_from(KINDS), st.integers(0, 1 << 34), st.integers(2, 300), st.sampled_from([SWITCH, MESH]))
def test_a_faster_interconnect_never_takes_more_time(
    kind: str, contribution: int, members: int, interconnect: Interconnect
) -> None:
    faster = replace(interconnect, bandwidth=interconnect.bandwidth * 3, latency_s=interconnect.latency_s / 2)
    slow = collective_time(kind, contribution, members, interconnect)
    assert collective_time(kind, contribution, members, faster) <= slow


@settings(deadline=None)
@given(st.integers(1, 1 << 34), st.integers(2, 300))
def test_no_time_is_below_what_must_cross_the_link_of_a_rank(contribution: int, members: int) -> None:
    share = (members - 1) / members
    least = {
        "all_reduce": 2 * share * contribution,
        "reduce_scatter": share * contribution,
        "all_gather": (members - 1) * contribution,
        "all_to_all": share * contribution,
        "send_recv": contribution,
        "permute": contribution,
        "gather": (members - 1) * contribution,
        "scatter": (members - 1) * contribution,
        "reduce": contribution,
    }
    for kind, crossing in least.items():
        if kind == "all_reduce" and members == 2:
            crossing = contribution  # both send everything at once
        assert collective_time(kind, contribution, members, SWITCH) >= crossing / SWITCH.bandwidth * (1 - 1e-9)
