"""The campaign: what it counts, what it keeps, when it ends."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import fx

from tcverify.application import InProcess, Subject
from tcverify.application.loading import prepare_pass
from tcverify.campaign import (
    Campaign,
    CampaignFinished,
    CampaignPlan,
    CampaignStarted,
    Crashed,
    Event,
    FindingFound,
    Progress,
    in_flight,
    program_verifier,
    recover_in_flight,
)
from tcverify.campaign import campaign as campaign_driver
from tcverify.campaign.earlier_failures import Failures
from tcverify.campaign.in_flight import InFlight, read_in_flight
from tcverify.cases.counterexample import Counterexample, read_counterexample
from tcverify.domains import Domain
from tcverify.errors import ExecutorError, InternalError, Unsupported, UsageError
from tcverify.execution import ProcessGroupPool
from tcverify.passes import Identity, SequenceParallel
from tcverify.program import Contract, Program, dumps, program_id
from tcverify.strategies import transformer_programs
from tests.sizes import by_night
from tests.support.programs import reduce_then_norm

STRUCTURED = transformer_programs(world_size=2)


def reductions(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.op == "call_function" and "all_reduce" in str(n.target)]


def _subject(pass_: Any, **contract: bool) -> Subject:
    subject = InProcess(prepare_pass(pass_, "", {}))
    subject.contract = replace(subject.contract, **contract)
    return subject


def go(
    place: Path,
    pass_: Any,
    *,
    contract: Contract | None = None,
    confirm: ProcessGroupPool | None = None,
    subscribers: Sequence[Callable[[Event], None]] = (),
    **plan: Any,
) -> CampaignFinished:
    options = {"programs": STRUCTURED, "max_examples": 20, "seed": 1, "shrink_time": 2.0, **plan}
    where = {"report_dir": place / "reports", "state_dir": place / "state"}
    subject = pass_ if isinstance(pass_, InProcess) else _subject(pass_)
    return Campaign(
        subject, CampaignPlan(mesh="2 ranks", contract=contract, **where, **options), confirm, subscribers
    ).run()


Run = Callable[..., CampaignFinished]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs a pass in this process and in lockstep: `run(pass, max_examples=…)`; other names are those of `CampaignPlan`."""
    return partial(go, tmp_path)


@dataclass(frozen=True)
class Raised:
    """What a campaign has found whose pass raises, what it told, and where it has left it."""

    finished: CampaignFinished
    events: list[Event]
    place: Path

    def left(self, place: Path) -> Path:
        """Copy it to another place; return the one failure there."""
        shutil.copytree(self.place, place, dirs_exist_ok=True)
        (failure,) = place.glob("state/failures/*/*/counterexample.json")
        return failure


@pytest.fixture(scope="module")
def raised(tmp_path_factory: pytest.TempPathFactory) -> Raised:
    """One campaign, at which many tests look."""
    place, events = tmp_path_factory.mktemp("raised"), list[Event]()
    return Raised(go(place, raises, subscribers=[events.append]), events, place)


# ------------------------------------------------------------------------------------------------------------- passes


def drops_reductions(gm: fx.GraphModule) -> None:
    for node in reductions(gm):
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def raises(gm: fx.GraphModule) -> None:
    if reductions(gm):
        raise ValueError("no idea")


def declines(gm: fx.GraphModule) -> None:
    raise Unsupported("not today")


class Fails:
    """Fails in another way for every number of reductions."""

    def __call__(self, gm: fx.GraphModule) -> Any:
        found = reductions(gm)
        if len(found) == 1:
            raise ValueError("one")
        if len(found) == 2:
            return 42
        if len(found) > 2:
            found[0].replace_all_uses_with(found[0].args[0])
        return None


# ------------------------------------------------------------------------------------------------------------ counting


def test_the_identity_passes(run: Run) -> None:
    finished = run(Identity)
    assert (finished.verdict, finished.statistics.passed, finished.statistics.changed) == ("passed", 20, 0)


def test_a_pass_that_changes_nothing_has_not_been_tested(run: Run) -> None:
    finished = run(lambda gm: None)
    assert finished.verdict == "nothing tested"
    assert finished.why == "the pass changed none of 20 programs"


def test_counts_are_those_of_the_programs(run: Run) -> None:
    number = by_night(40, 20)
    counts = run(SequenceParallel, max_examples=number).statistics
    assert counts.programs == counts.passed == number
    assert counts.refuted == counts.inconclusive == 0
    assert counts.ran == {"lockstep": number}
    assert counts.changed >= max(counts.fired.values()) > 0
    assert all(counts.rewrites[pattern] >= 2 * fired for pattern, fired in counts.fired.items())


def test_programs_are_counted_by_executor(run: Run, pool: Callable[[int], ProcessGroupPool]) -> None:
    counts = run(Identity, confirm=pool(2), max_examples=6).statistics
    assert counts.ran == {"lockstep": 6, "gloo": 6}


def test_a_refuted_program_is_not_confirmed(run: Run, pool: Callable[[int], ProcessGroupPool]) -> None:
    counts = run(drops_reductions, confirm=pool(2), max_examples=15).statistics
    assert counts.ran["gloo"] == counts.passed < counts.ran["lockstep"] == 15


def test_a_value_finding_is_confirmed_on_the_process_group(run: Run, pool: Callable[[int], ProcessGroupPool]) -> None:
    found = run(drops_reductions, confirm=pool(2), max_examples=15).counterexamples
    wrong = next(case for case in found if case.finding.kind == "wrong-value")
    assert wrong.executors == ("lockstep", "gloo")


def test_inconclusive_is_not_passed(run: Run) -> None:
    finished = run(declines)
    assert finished.verdict == "nothing tested"
    assert (finished.statistics.passed, finished.statistics.inconclusive) == (0, 20)
    assert finished.why == "no program passed (20 declined)"


def test_trials_of_shrinking_are_counted_apart(raised: Raised) -> None:
    counts = raised.finished.statistics
    assert counts.programs == 20
    assert counts.shrinking > 0
    assert counts.programs == counts.passed + counts.refuted
    assert 0 < counts.seconds["shrinking"] < counts.elapsed


# ------------------------------------------------------------------------------------------------------------ findings


def test_one_counterexample_per_kind(run: Run) -> None:
    finished = run(Fails, max_examples=40, shrink_time=0.3, contract=Contract(metadata=False))
    kinds = [case.finding.kind for case in finished.counterexamples]
    assert len(kinds) == len(set(kinds)) >= 3
    assert {"pass-raised", "malformed-graph"} < set(kinds)
    assert set(kinds) == set(finished.statistics.findings)
    assert finished.statistics.programs == 40


def test_counterexamples_are_shrunk(raised: Raised) -> None:
    (case,) = raised.finished.counterexamples
    assert case.program.size == 1 < case.size_drawn
    assert not case.shrink_cut


class Remembers:
    """Adds zero to the sums of graphs that it has not seen before."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def __call__(self, gm: fx.GraphModule) -> None:
        text = str(gm.graph)
        for node in reductions(gm) if text not in self.seen else []:
            with gm.graph.inserting_after(node):
                same = gm.graph.call_function(torch.ops.aten.add.Tensor, (node, 0.0))
            node.replace_all_uses_with(same, delete_user_cb=lambda user, same=same: user is not same)
        self.seen.add(text)


def test_what_only_a_deep_look_shows_is_shrunk_deeply(run: Run) -> None:
    found = run(Remembers, max_examples=60, shrink_time=60.0, contract=Contract(metadata=False)).counterexamples
    (case,) = found
    assert (case.finding.kind, case.deep) == ("impure-pass", True)
    assert case.program.size == 1 < case.size_drawn


def test_counterexamples_are_on_disk_when_they_are_told(run: Run, tmp_path: Path) -> None:
    told: list[Counterexample] = []

    def look(event: Event) -> None:
        if isinstance(event, FindingFound):
            path = tmp_path / "reports" / event.counterexample.id / "counterexample.json"
            told.append(read_counterexample(path))

    finished = run(raises, subscribers=[look])
    assert [case.id for case in told] == [case.id for case in finished.counterexamples]


def test_a_finding_that_cannot_be_kept_is_told_before_the_run_ends(run: Run, tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("")  # for root, too
    events: list[Event] = []
    with pytest.raises(UsageError, match="cannot be written"):
        run(raises, shrink_time=0.0, subscribers=[events.append])
    (found,) = [event for event in events if isinstance(event, FindingFound)]
    assert found.counterexample.finding.kind == "pass-raised"


def test_without_time_the_program_stays_as_it_was_drawn(run: Run) -> None:
    (case,) = run(raises, shrink_time=0.0).counterexamples
    assert case.shrink_cut
    assert case.program.size == case.size_drawn


def test_fail_fast_stops_at_the_first_finding(run: Run) -> None:
    finished = run(raises, fail_fast=True, max_examples=1000)
    assert finished.stop == "first finding"
    assert finished.statistics.programs < 1000
    assert len(finished.counterexamples) == 1


def test_events_come_in_order(raised: Raised) -> None:
    events = raised.events
    assert isinstance(events[0], CampaignStarted)
    assert isinstance(events[-1], CampaignFinished)
    assert {type(event) for event in events[1:-1]} == {Progress, FindingFound}


def test_a_flaky_finding_is_kept(run: Run) -> None:
    calls = []

    def sometimes(gm: fx.GraphModule) -> None:
        calls.append(gm)
        if len(calls) == 1:
            raise ValueError("once")

    (case,) = run(sometimes, shrink_time=1.0).counterexamples
    assert case.finding.kind == "pass-raised"


# ----------------------------------------------------------------------------------------------------------- its end


def test_time_ends_it(run: Run) -> None:
    finished = run(Identity, max_examples=None, max_time=0.5)
    assert finished.stop == "time"
    assert finished.statistics.programs > 0


def test_rounds_draw_all_that_was_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    programs = transformer_programs(world_size=2).map(lambda one: drawn.append(program_id(one)) or one)
    monkeypatch.setattr(campaign_driver, "BATCH", 5)
    finished = run(Identity, programs=programs, max_examples=12)
    assert (finished.stop, finished.statistics.programs) == ("examples", 12)
    assert len(set(drawn)) >= 10, "each round has a seed of its own, and begins with the simplest program"


def test_a_strategy_that_has_no_more_ends_it(run: Run) -> None:
    finished = run(Identity, programs=st.just(reduce_then_norm()))
    assert (finished.stop, finished.statistics.programs) == ("exhausted", 1)


def test_an_interrupt_keeps_what_was_found(run: Run, tmp_path: Path) -> None:
    def interrupted(event: Event) -> None:
        if isinstance(event, Progress) and event.statistics.shrinking == 3:
            raise KeyboardInterrupt

    finished = run(raises, subscribers=[interrupted])
    assert finished.stop == "interrupted"
    (case,) = finished.counterexamples
    assert (tmp_path / "reports" / case.id / "counterexample.json").is_file()
    assert not list((tmp_path / "state").glob("in-flight*"))


def test_an_interrupt_while_a_finding_is_confirmed_keeps_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = program_verifier.verify

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if options.get("always_confirm"):
            raise KeyboardInterrupt
        return real(*arguments, **options)

    class NeverAsked:
        name = "gloo"

    monkeypatch.setattr(program_verifier, "verify", interrupted)
    monkeypatch.setattr("tcverify.verification.verifier.worth_confirming", lambda *_: False)
    finished = run(drops_reductions, confirm=NeverAsked())
    assert finished.stop == "interrupted"
    last = finished.counterexamples[-1]
    assert last.finding.kind in ("wrong-value", "wrong-alias", "rewritten-raises")
    assert last.executors == ("lockstep",)


def test_an_interrupt_keeps_a_finding_whose_program_is_still_under_way(run: Run) -> None:
    applied: list[fx.GraphModule] = []

    def second_is_interrupted(gm: fx.GraphModule) -> None:
        applied.append(gm)
        raise ValueError("no idea") if len(applied) == 1 else KeyboardInterrupt

    finished = run(second_is_interrupted)
    assert finished.stop == "interrupted"
    assert [case.finding.kind for case in finished.counterexamples] == ["pass-raised"]
    assert (finished.statistics.programs, finished.statistics.refuted) == (1, 1)


def test_an_error_of_ours_is_raised_and_its_program_kept(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[Program] = []

    def breaks(subject: Subject, program: Program, **_: Any) -> Iterator[None]:
        programs.append(program)
        raise InternalError("oops")
        yield  # as verifications do, which are generators

    events: list[Event] = []
    monkeypatch.setattr(program_verifier, "verify_in_steps", breaks)
    with pytest.raises(InternalError, match="oops"):
        run(Identity, subscribers=[events.append])
    (crashed,) = [event for event in events if isinstance(event, Crashed)]
    assert len(programs) == 1  # Hypothesis did not shrink our error
    assert dumps(read_counterexample(crashed.path).program) == dumps(programs[0])
    assert not list((tmp_path / "state").glob("in-flight*"))


def test_output_that_nobody_reads_is_no_crash(run: Run, tmp_path: Path) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, Progress):
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        run(raises, subscribers=[listen])
    assert not list(tmp_path.rglob("crashed-*"))


# ---------------------------------------------------------------------------------------------------- repeating runs


def _programs_of(tmp_path: Path, name: str, seed: int) -> tuple[list[str], list[str]]:
    """The programs that a campaign without a past gives to a pass, and what it finds."""
    seen: list[str] = []

    class Watching(InProcess):
        def apply(self, program: Program, *, deep: bool = False) -> Any:
            seen.append(program_id(program))
            return super().apply(program, deep=deep)

    plan = CampaignPlan(STRUCTURED, "2 ranks", tmp_path / "reports", tmp_path / name, max_examples=15, seed=seed)
    finished = Campaign(Watching(prepare_pass(raises, "", {})), plan, None).run()
    return seen, [case.id for case in finished.counterexamples]


def test_the_same_seed_draws_the_same_programs(tmp_path: Path) -> None:
    first = _programs_of(tmp_path, "one", 5)
    assert _programs_of(tmp_path, "two", 5) == first
    assert _programs_of(tmp_path, "three", 6) != first


def test_earlier_failures_are_tried_first(run: Run, raised: Raised, tmp_path: Path) -> None:
    raised.left(tmp_path)
    (case,) = raised.finished.counterexamples
    starts: list[int] = []

    def note(event: Event) -> None:
        if isinstance(event, CampaignStarted):
            starts.append(event.earlier)

    again = run(raises, seed=2, max_examples=1, subscribers=[note])
    assert starts == [1]
    assert [c.id for c in again.counterexamples] == [case.id]


def test_failures_that_are_no_news_are_not_forgotten(run: Run, raised: Raised, tmp_path: Path) -> None:
    failure = raised.left(tmp_path)
    (case,) = raised.finished.counterexamples
    other = replace(case, id="0123abcd", program=replace(case.program, seed=case.program.seed + 1))
    Failures(tmp_path / "state", _subject(raises).facts, "2 ranks").add(other)
    assert len(run(raises, max_examples=3).counterexamples) == 1
    assert {path.name for path in failure.parents[1].iterdir()} >= {case.id, other.id}


def test_failures_that_are_gone_are_forgotten(run: Run, raised: Raised, tmp_path: Path) -> None:
    failure = raised.left(tmp_path)
    mended = _subject(lambda gm: None)
    mended.facts = _subject(raises).facts
    run(mended)
    assert not failure.exists()


def test_failures_that_could_not_be_judged_are_not_forgotten(run: Run, raised: Raised, tmp_path: Path) -> None:
    class Broken:
        name = "gloo"

        def start_comparison(self, original: Program, rewritten: Program, domain: Domain) -> Any:
            raise ExecutorError("no group today")

    failure = raised.left(tmp_path)
    mended = _subject(lambda gm: None)
    mended.facts = _subject(raises).facts
    run(mended, confirm=Broken(), max_examples=1)
    assert failure.exists()


def test_a_damaged_failure_is_dropped(run: Run, raised: Raised, tmp_path: Path) -> None:
    failure = raised.left(tmp_path)
    failure.write_text("{")
    assert run(raises, seed=2).statistics.programs == 20


# ----------------------------------------------------------------------------------------------------------- in flight


def test_the_program_in_flight_is_on_disk_while_a_pass_runs(run: Run, tmp_path: Path) -> None:
    seen: list[bool] = []

    class Looks(InProcess):
        def apply(self, program: Program, *, deep: bool = False) -> Any:
            (noted,) = (tmp_path / "state").glob(f"in-flight-*-{os.getpid()}.json")
            case = read_in_flight(noted)
            seen.append(dumps(case.program) == dumps(program) and case.deep == deep)
            return super().apply(program, deep=deep)

    run(Looks(prepare_pass(raises, "", {})))
    assert len(seen) > 20
    assert all(seen)
    assert not list((tmp_path / "state").glob("in-flight*"))


def _dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def _left_over(run: Run, tmp_path: Path, pid: int) -> Path:
    """Make the file that a run leaves behind which died while it verified."""
    texts: list[str] = []
    notes: list[Path] = []

    def copy(gm: fx.GraphModule) -> None:
        (noted,) = (tmp_path / "state").glob(f"in-flight-*-{os.getpid()}.json")
        notes.append(noted)
        texts.append(noted.read_text())

    run(copy, max_examples=1)
    path = notes[0].with_name(notes[0].name.replace(f"-{os.getpid()}.", f"-{pid}."))
    path.write_text(texts[0])
    return path


def test_what_a_dead_run_left_is_kept_as_a_counterexample(run: Run, tmp_path: Path) -> None:
    path = _left_over(run, tmp_path, _dead_pid())
    (kept,) = recover_in_flight(tmp_path / "state", tmp_path / "reports")
    case = read_counterexample(kept)
    assert kept == tmp_path / "reports" / f"crashed-{case.id}.json"
    assert case.finding.kind == "run-died"
    assert not path.exists()
    assert recover_in_flight(tmp_path / "state", tmp_path / "reports") == []


def test_what_a_run_of_another_machine_has_left_is_for_that_machine(run: Run, tmp_path: Path) -> None:
    path = _left_over(run, tmp_path, _dead_pid())
    moved = path.rename(path.with_name(path.name.replace("in-flight-", "in-flight-x")))
    assert recover_in_flight(tmp_path / "state", tmp_path / "reports") == []
    assert moved.exists()


def seeded(seed: int) -> Program:
    return replace(reduce_then_norm(), seed=seed)


def test_the_last_whole_line_is_the_program_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = [seeded(number) for number in range(4)]
    notes = InFlight(tmp_path, InProcess(prepare_pass(raises, "", {})), Contract())
    for program in programs[:3]:
        notes.note(program, False)
    assert dumps(read_in_flight(notes.path).program) == dumps(programs[2])
    with notes.path.open("ab") as file:  # the run dies while it writes the next one
        file.write(b'{"format": "tcv')
    assert dumps(read_in_flight(notes.path).program) == dumps(programs[2])
    monkeypatch.setattr(in_flight, "MOST_BYTES", 0)
    notes.note(programs[3], True)
    assert len(notes.path.read_bytes().splitlines()) == 1  # begun anew
    assert read_in_flight(notes.path).deep
    assert dumps(read_in_flight(notes.path).program) == dumps(programs[3])
    notes.clear()
    assert not list(tmp_path.iterdir())


def test_a_program_that_cannot_be_written_down_whole_hides_no_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = InFlight(tmp_path, InProcess(prepare_pass(raises, "", {})), Contract())
    notes.note(seeded(0), False)
    limit = notes.path.stat().st_size + 100
    monkeypatch.setattr(in_flight, "dumps", lambda program: "x" * (1 << 20))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(UsageError, match="is the disk full"):
            notes.note(seeded(1), False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert dumps(read_in_flight(notes.path).program) == dumps(seeded(0))
    monkeypatch.undo()
    notes.note(seeded(2), False)
    assert dumps(read_in_flight(notes.path).program) == dumps(seeded(2))
    notes.clear()


def test_what_a_living_run_has_in_flight_is_left_alone(run: Run, tmp_path: Path) -> None:
    path = _left_over(run, tmp_path, os.getppid())
    assert recover_in_flight(tmp_path / "state", tmp_path / "reports") == []
    assert path.exists()


def test_a_truncated_file_in_flight_is_kept_as_it_is(run: Run, tmp_path: Path) -> None:
    path = _left_over(run, tmp_path, _dead_pid())
    path.write_text(path.read_text()[:50])
    (kept,) = recover_in_flight(tmp_path / "state", tmp_path / "reports")
    assert kept.name == path.name.replace("in-flight-", "crashed-")
    assert len(kept.read_text()) == 50


def test_nothing_is_recovered_from_nothing(tmp_path: Path) -> None:
    assert recover_in_flight(tmp_path / "state", tmp_path / "reports") == []
    assert not list(tmp_path.iterdir())


def test_ids_depend_on_program_pass_and_kind_alone(run: Run, tmp_path: Path) -> None:
    (case,) = run(raises).counterexamples
    data = json.loads((tmp_path / "reports" / case.id / "counterexample.json").read_text())
    plan = CampaignPlan(
        st.just(case.program),
        "other",
        tmp_path / "elsewhere",
        tmp_path / "fresh",
        seed=9,
        contract=Contract(metadata=False),
    )
    (again,) = Campaign(_subject(raises), plan, None).run().counterexamples
    assert again.id == case.id == data["id"]
