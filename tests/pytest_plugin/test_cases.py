"""From the arguments of `verifies` to cases: what is made of them, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tcverify import Mesh, Program
from tcverify.errors import UsageError
from tcverify.passes import Identity, SequenceParallel
from tcverify.program import MeshDim
from tcverify.pytest_plugin.cases import PytestCase, make_cases
from tcverify.pytest_plugin.decorator import ATTRIBUTE, Verification, verifies
from tcverify.pytest_plugin.options import FRESH_PATH, Options
from tcverify.pytest_plugin.running import item_seed
from tcverify.pytest_plugin.summary import SummaryItem, write_summary
from tcverify.pytest_plugin.worlds import MAX_THROWN_AWAY
from tcverify.strategies import decode, transformer_programs

PROGRAM = decode(Mesh.grid({"tp": 2}), b"")
HERE = Path(__file__).parent
OPTIONS = Options("none", "float64", "dev", HERE, HERE, HERE, HERE, FRESH_PATH, 0)


def asked(*passes: Any, **arguments: Any) -> Verification:
    def test() -> None:
        pass

    (found,) = getattr(verifies(*passes, **arguments)(test), ATTRIBUTE)
    assert isinstance(found, Verification)
    return found


def cases(*passes: Any, **arguments: Any) -> list[PytestCase]:
    return make_cases(asked(*passes, **arguments), OPTIONS)


def ids(*passes: Any, **arguments: Any) -> list[str]:
    return [case.id for case in cases(*passes, **arguments)]


def draw(strategy: st.SearchStrategy[Program], number: int = 10) -> list[Program]:
    drawn: list[Program] = []

    @settings(
        max_examples=number,
        phases=[Phase.generate],
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def note(program: Program) -> None:
        drawn.append(program)

    note()
    return drawn


# ----------------------------------------------------------------------------------------------------- what is made


def test_passes_worlds_and_shards_are_multiplied() -> None:
    assert ids(SequenceParallel, "identity", world_sizes=(2, 4), shards=2) == [
        f"{name}-{size}ranks-{shard}/2"
        for name in ("SequenceParallel", "identity")
        for size in (2, 4)
        for shard in (0, 1)
    ]


def test_the_default_worlds_are_those_of_run() -> None:
    assert ids(SequenceParallel) == ["SequenceParallel-2ranks", "SequenceParallel-3ranks", "SequenceParallel-4ranks"]


def test_meshes_have_readable_ids() -> None:
    crossed = Mesh(4, (MeshDim("tp", ((1, 0), (2, 3))),))
    assert ids("identity", meshes=[{"tp": 2}, {"dp": 2, "tp": 2}, crossed]) == [
        "identity-tp2",
        "identity-dp2tp2",
        "identity-tp1.0_2.3",
    ]


def test_the_profile_says_how_much() -> None:
    for name, shards, programs in (("dev", 1, 100), ("ci", 4, 150), ("nightly", 16, 1000)):
        found = make_cases(asked("identity", world_sizes=[2]), replace(OPTIONS, profile=name))
        assert (len(found), found[0].max_examples) == (shards, programs)


def test_the_decorator_says_more_than_the_profile() -> None:
    found = make_cases(
        asked("identity", world_sizes=[2], shards=3, max_examples=7, confirm="none"),
        replace(OPTIONS, profile="nightly", confirm="gloo"),
    )
    assert [(case.max_examples, case.confirm) for case in found] == [(7, "none")] * 3


@pytest.mark.parametrize("programs", [None, "structured", transformer_programs, transformer_programs()])
def test_programs_have_the_size_that_is_asked_for(programs: Any) -> None:
    (case,) = cases("identity", programs=programs, world_sizes=[3])
    assert {program.world_size for program in draw(case.world.programs)} == {3}


def test_programs_are_on_the_mesh_that_is_asked_for() -> None:
    (case,) = cases("identity", meshes=[{"tp": 2}])
    assert {program.mesh for program in draw(case.world.programs)} == {Mesh.grid({"tp": 2})}


def test_a_strategy_alone_draws_its_own_sizes() -> None:
    (case,) = cases("identity", programs=transformer_programs())
    assert case.id == "identity"
    assert {program.world_size for program in draw(case.world.programs, 30)} == {2, 3, 4}


def test_a_class_is_found_by_its_module() -> None:
    (case,) = cases(SequenceParallel, world_sizes=[2])
    assert case.reference.targets == ("tcverify.passes.sequence_parallel.sequence_parallel:SequenceParallel",)


def test_an_instance_stays_in_this_process() -> None:
    pass_ = Identity()
    (case,) = cases(pass_, world_sizes=[2])
    assert (case.reference.label, case.reference.targets) == ("identity", ())
    assert case.reference.subject is pass_


def local(gm: Any) -> None:
    """A pass in a file that only pytest knows how to import."""


def test_a_pass_of_a_test_file_is_found_by_the_file_first() -> None:
    (case,) = make_cases(asked(local, world_sizes=[2]), replace(OPTIONS, fresh_path=()))
    assert case.reference.targets == ("test_cases.py:local", "tests.pytest_plugin.test_cases:local")


def test_seeds_come_from_the_node_id() -> None:
    assert item_seed("test_it.py::test[a]", 0) == 3322023616
    assert (
        item_seed("test_it.py::test[b]", 0)
        != item_seed("test_it.py::test[a]", 0)
        != item_seed("test_it.py::test[a]", 1)
    )


# -------------------------------------------------------------------------------------------------- what is refused


def _bare(mesh: Any, world_size: Any) -> Any:
    return 42


REFUSED = [
    ((), {}, "names no pass"),
    (("sequence_paralel",), {}, "there is no built-in pass 'sequence_paralel'"),
    (("no/such/file.py:thing",), {}, "there is no file no/such/file.py"),
    ((42,), {}, "42 is not a pass"),
    ((["identity"],), {}, "is not a pass"),
    (("identity",), {"world_sizes": (1,)}, "a program needs at least 2 ranks, not 1"),
    (("identity",), {"world_sizes": (2, "4")}, "'4' in world_sizes is not a number of ranks"),
    (("identity",), {"world_sizes": (65,)}, "65 ranks are more"),
    (("identity",), {"world_sizes": (8,)}, "no meshes are listed for world size 8"),
    (("identity",), {"world_sizes": 2}, "world_sizes=2 is not a list"),
    (("identity",), {"world_sizes": ()}, "world_sizes is empty"),
    (("identity",), {"meshes": []}, "meshes is empty"),
    (("identity",), {"meshes": {"tp": 2}}, "is not a list"),
    (("identity",), {"meshes": ["tp=2"]}, "'tp=2' in meshes is not a mesh"),
    (("identity",), {"meshes": [{"tp": 0}]}, "not all at least 1"),
    (("identity",), {"meshes": [{"tp": 1}]}, "at least 2 ranks, not 1"),
    (("identity",), {"meshes": [{"tp": 2}], "world_sizes": (2,)}, "exclude each other"),
    (("identity",), {"meshes": [{"tp": 2}], "programs": st.just(PROGRAM)}, "cannot be combined with a strategy"),
    (("identity",), {"programs": 42}, "programs=42 is not a strategy"),
    (("identity",), {"programs": "structurd"}, "there is no programs='structurd'"),
    (("identity",), {"programs": _bare}, "programs=_bare returned 42"),
    (("identity",), {"programs": lambda: None}, "cannot be called: TypeError"),
    (("identity",), {"max_examples": 0}, "max_examples=0 is not a number"),
    (("identity",), {"max_examples": True}, "max_examples=True is not a number"),
    (("identity",), {"shards": 1001}, "shards=1001"),
    (("identity",), {"contract": {"idempotnt": True}}, "'idempotnt' is not a promise"),
    (("identity",), {"contract": {"idempotent": "yes"}}, "not true or false"),
    (("identity",), {"contract": 3}, "contract=3 is not a contract"),
    (("identity",), {"checks": ["equivalenc"]}, "there is no checks='equivalenc'"),
    (("identity",), {"checks": "equivalence"}, "is not a list"),
    (("identity",), {"checks": ()}, "checks is empty"),
    (("identity",), {"hostile": "metadata"}, "is not a list"),
    (("identity",), {"hostile": ["metadat"]}, "there is no hostile='metadat'"),
    (("identity",), {"confirm": "mpi"}, "there is no confirm='mpi'"),
    (("identity",), {"pass_options": {"dump": Path()}}, "cannot be sent to the pass's process"),
    (("identity",), {"pass_options": ["x"]}, "are not options by name"),
    (("identity",), {"pass_timeout": 0}, "pass_timeout=0 is not a time"),
    (("identity",), {"shrink_time": -1}, "shrink_time=-1 is not a time"),
    (("identity",), {"shrink_time": float("nan")}, "shrink_time=nan is not a time"),
]


@pytest.mark.parametrize(("passes", "arguments", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_makes_no_sense_is_refused(passes: tuple[Any, ...], arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        cases(*passes, **arguments)
    assert message in caught.value.message


def test_a_strategy_that_never_draws_the_size_is_given_up() -> None:
    programs = st.integers().map(lambda _: PROGRAM)
    (case,) = cases("identity", programs=programs, world_sizes=[3])
    with pytest.raises(UsageError, match=f"no program of 3 ranks among {MAX_THROWN_AWAY}"):
        draw(case.world.programs, 1000)


def test_a_strategy_is_to_draw_programs() -> None:
    (case,) = cases("identity", programs=st.just(42))
    with pytest.raises(UsageError, match="the strategy drew a int"):
        draw(case.world.programs)


def test_the_domain_is_that_of_the_options_unless_the_decorator_names_one() -> None:
    assert {case.domain for case in cases(Identity)} == {"float64"}
    assert {case.domain for case in cases(Identity, domain="exact")} == {"exact"}
    with pytest.raises(UsageError, match="real"):
        cases(Identity, domain="real")


def test_a_domain_that_stepped_aside_is_told_of_an_item_that_passed() -> None:
    item = SummaryItem("test_a.py::test_a", "passed", 3, 3, 0, 0, 2, {}, {}, 1, said=("exact-aside: 2 programs (why)",))
    lines: list[str] = []

    class Lines:
        write_sep = staticmethod(lambda sep, title: None)
        write_line = staticmethod(lambda line, **markup: lines.append(line))

    quiet = replace(item, nodeid="test_a.py::test_b", said=())
    write_summary(Lines(), [SummaryItem.from_data(item.to_data()), quiet], (), (), brief=True)  # type: ignore[arg-type]
    assert lines == ["passed: test_a.py::test_a", f"  {item.line()}", "  exact-aside: 2 programs (why)"]
