"""Campaigns in slices: what is handed out, and what becomes of the answers. Real workers are in tests/faults/test_workers.py."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st

from tcverify.application import CodePoint, Guarded
from tcverify.campaign import (
    CampaignFinished,
    CampaignPlan,
    CampaignStarted,
    Corpus,
    CorpusCase,
    Coverage,
    Event,
    FindingFound,
    Progress,
    Statistics,
)
from tcverify.campaign.search import ProgramSearch
from tcverify.cases.baseline import Baseline, KnownFinding, known_of
from tcverify.cases.counterexample import read_counterexample, write_counterexample
from tcverify.errors import ExecutorError, PassLoadError, UnsupportedOp, UsageError
from tcverify.program import Contract, Mesh, Program, dumps
from tcverify.report.coverage import unreached_lines
from tcverify.strategies import STRATEGIES, register_strategy
from tcverify.workers import RANGE, DividedCampaign, DrawPlan, Slice, SliceOutcome, Worker, driver
from tcverify.workers.driver import LOST_LIMIT, WORKERS_DIR, recover_cases
from tcverify.workers.worker import longest_silence
from tests.support.programs import reduce_then_norm

PASSES = """\
import torch

MULTIPLY = torch.ops.aten.mul.Tensor


def does_nothing(gm):
    pass


def drops_reductions(gm):
    for node in [n for n in gm.graph.nodes if n.op == "call_function" and "all_reduce" in str(n.target)]:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def forgets_metadata(gm):
    for node in [n for n in gm.graph.nodes if n.op == "call_function" and "all_reduce" in str(n.target)]:
        with gm.graph.inserting_after(node):
            once = gm.graph.call_function(MULTIPLY, (node, 1.0))
        node.replace_all_uses_with(once, delete_user_cb=lambda user, new=once: user is not new)
"""

#: A pass of which one process reaches one part and all others another, and one that is reached as a whole.
PARTS = """\
import os


def parts(gm):
    if mine("first"):
        one()
    else:
        other()
    if not gm.graph.nodes:
        never()


def mine(name, held=[]):
    try:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
        held.append(name)
    except FileExistsError:
        pass
    return name in held


def one():
    return 1


def other():
    return 2


def never():
    return 3
"""
WHOLE = """\
def whole(gm):
    for node in gm.graph.nodes:
        if node.op == "output":
            done()


def done():
    pass
"""
TWO = DrawPlan("small", 2)


def small(mesh: Mesh | None = None, world_size: int | None = None) -> st.SearchStrategy[Program]:
    """A reduction and a norm, with different values each time."""
    return st.integers(0, 9999).map(lambda seed: replace(reduce_then_norm(), seed=seed, labels=(f"seed {seed}",)))


@pytest.fixture(scope="module", autouse=True)
def _strategy() -> Iterator[None]:
    register_strategy("small", small)
    yield
    del STRATEGIES["small"]


class Here:
    """A crew that works in this process, one slice at a time; `dies` says which attempts at slices end it."""

    def __init__(self, size: int = 1, dies: Callable[[int], bool] = lambda number: False) -> None:
        self.size = size
        self.given: list[Slice] = []
        self.most = 0
        self._waiting: list[tuple[int, str]] = []
        self._dies = dies
        self._worker = Worker()

    def submit(self, number: int, text: str) -> None:
        self._waiting.append((number, text))
        self.given.append(Slice.loads(text))
        self.most = max(self.most, len(self._waiting))

    def next(self) -> tuple[int, str | None]:
        number, text = self._waiting.pop()
        return number, None if self._dies(number) else self._worker.work(text)

    def interrupt(self) -> None:
        """What waits is done at once here."""

    def close(self) -> None:
        self._worker.__exit__(None, None, None)


@pytest.fixture(scope="module")
def passes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("passes") / "mine.py"
    path.write_text(PASSES)
    return path


@pytest.fixture(scope="module")
def subject(passes: Path) -> Iterator[Callable[[str], Guarded]]:
    made: dict[str, Guarded] = {}

    def get(name: str) -> Guarded:
        if name not in made:
            made[name] = Guarded(f"{passes}:{name}" if ":" not in name else name)
        return made[name]

    yield get
    for one in made.values():
        one.close()


@pytest.fixture
def run(tmp_path: Path, subject: Callable[[str], Guarded]) -> Iterator[Callable[..., CampaignFinished]]:
    crews: list[Here] = []

    def go(
        of: str | Guarded,
        crew: Here | None = None,
        told: list[str] | None = None,
        events: list[Event] | None = None,
        **plan: Any,
    ) -> CampaignFinished:
        crews.append(crew or Here())
        options: dict[str, Any] = {"max_examples": 20, "seed": 1, "shrink_time": 0.5, "earlier": False, **plan}
        plan_ = CampaignPlan(TWO.programs(), "2 ranks", tmp_path / "reports", tmp_path / "state", **options)
        campaign = DividedCampaign(
            of if isinstance(of, Guarded) else subject(of), plan_, TWO, "none", crews[-1],
            (told if told is not None else []).append, [(events if events is not None else []).append],
        )  # fmt: skip
        return campaign.run()

    yield go
    for crew in crews:
        crew.close()


Run = Callable[..., CampaignFinished]

# ---------------------------------------------------------------------------------------------------------- messages


def test_a_slice_is_read_as_it_was_written() -> None:
    case = CorpusCase("mine:Pass", "2 ranks", reduce_then_norm(), ("a",), "wrong-value", deep=True)
    known = (known_entry(),)
    part = Slice(
        number=3, drawing=DrawPlan("structured", 4, {"dp": 2, "tp": 2}, {"cap": [1, "x", False]}), mesh="dp=2,tp=2",
        target="mine:Pass", pass_options={"a": "b"}, pass_timeout=7.0, contract=Contract(metadata=False), confirm="gloo",
        checks=["equivalence"], domain="exact", shrink_time=1.5, max_examples=50, max_time=None, seed=99, directory="/d",
        report_dir="/r", state_dir="/s", corpus="/c", fail_fast=True, collect=True, deep=True, earlier=True, known=known,
        told=known, first=(case,), extensions={"references": ["m"], "path": []},
    )  # fmt: skip
    again = Slice.loads(part.dumps())
    assert again.dumps() == part.dumps()
    assert replace(again, first=()) == replace(part, first=(), known=list(known), told=list(known))
    assert dumps(again.first[0].program) == dumps(case.program)
    assert again.programs == 51
    again.drawing.programs().validate()


def known_entry() -> KnownFinding:
    return KnownFinding("mine:Pass", "wrong-value", "norm is #", "title", "abc", "reason")


@pytest.mark.parametrize("error", [UsageError("no", "do"), PassLoadError("what"), UnsupportedOp("aten::x", "why")])
def test_errors_of_workers_are_errors_here(error: Any) -> None:
    counts = Statistics(programs=3, fired=Counter(p=2), doubt_details={"a": "b"})
    outcome = SliceOutcome.loads(SliceOutcome(counts, stop="failed", crashed=["x"], error=error).dumps())
    assert type(outcome.error) is type(error)
    assert (outcome.error.message, outcome.error.hint) == (error.message, error.hint)
    assert outcome.statistics == counts
    assert (outcome.stop, outcome.crashed) == ("failed", ["x"])


def test_statistics_add_up() -> None:
    mine = Statistics(programs=1, fired=Counter(p=1), doubt_details={"a": "first"}, elapsed=5.0)
    mine.add(Statistics(programs=2, fired=Counter(p=1, q=1), doubt_details={"a": "x", "b": "y"}, elapsed=7.0))
    assert (mine.programs, mine.fired, mine.elapsed) == (3, {"p": 2, "q": 1}, 5.0)
    assert mine.doubt_details == {"a": "first", "b": "y"}


# ------------------------------------------------------------------------------------------------------------ merging


def test_the_workers_draw_as_many_programs_as_are_asked_for(run: Run) -> None:
    crew, events = Here(size=3), list[Event]()
    finished = run("tcverify.passes:Identity", crew, events=events, max_examples=RANGE + 5)
    counts = finished.statistics
    assert (finished.verdict, finished.stop) == ("passed", "examples")
    assert counts.programs == counts.passed == counts.ran["lockstep"] == RANGE + 5
    assert [part.max_examples for part in crew.given] == [RANGE, 5]
    assert crew.most == 2
    assert isinstance(events[0], CampaignStarted)
    assert isinstance(events[-1], CampaignFinished)
    assert sum(isinstance(event, Progress) for event in events) == 2


def test_what_a_seed_draws_does_not_depend_on_the_number_of_workers(run: Run) -> None:
    few, many = Here(size=1), Here(size=3)
    first = run("tcverify.passes:Identity", few, max_examples=RANGE + 5).statistics
    second = run("tcverify.passes:Identity", many, max_examples=RANGE + 5).statistics
    assert first.labels == second.labels
    assert sorted(p.seed for p in few.given) == sorted(p.seed for p in many.given)
    assert len({p.seed for p in few.given}) == 2


def test_a_finding_of_several_slices_is_told_once(run: Run, tmp_path: Path) -> None:
    events: list[Event] = []
    finished = run("drops_reductions", Here(size=2), events=events, max_examples=RANGE + 20)
    told = [event.counterexample for event in events if isinstance(event, FindingFound)]
    keys = [known_of(case).key for case in told]
    assert finished.verdict == "refuted"
    assert len(keys) == len(set(keys)) > 0
    assert tuple(told) == finished.counterexamples
    for case in told:
        assert read_counterexample(tmp_path / "reports" / case.id / "counterexample.json").id == case.id
    assert not (tmp_path / "reports" / WORKERS_DIR).exists()


def test_hygiene_has_one_case_of_all_slices(run: Run, tmp_path: Path) -> None:
    crew = Here(size=1)
    finished = run("forgets_metadata", crew, max_examples=RANGE + 10)
    assert (finished.verdict, finished.counterexamples) == ("passed", ())
    (case,) = finished.hygiene
    assert read_counterexample(tmp_path / "reports" / case.id / "counterexample.json").finding.severity == "hygiene"
    assert [entry.kind for entry in crew.given[1].told] == ["stale-metadata"]


def test_what_is_told_is_not_looked_for_again(run: Run) -> None:
    crew = Here(size=1)
    run("drops_reductions", crew, max_examples=RANGE + 10)
    assert not crew.given[0].told
    assert {entry.kind for entry in crew.given[1].told} >= {"wrong-value"}


def test_known_findings_do_not_refute(run: Run) -> None:
    found = run("drops_reductions").counterexamples
    baseline = Baseline().with_cases(found)
    finished = run("drops_reductions", baseline=baseline, max_examples=15)
    assert finished.statistics.known > 0
    assert {entry for entry, _ in finished.known} <= set(baseline.known)
    assert not {known_of(case).key for case in finished.counterexamples} & {entry.key for entry in baseline.known}


def test_the_first_finding_ends_it(run: Run) -> None:
    crew = Here(size=2)
    finished = run("drops_reductions", crew, fail_fast=True, max_examples=10 * RANGE)
    assert (finished.stop, finished.verdict) == ("first finding", "refuted")
    assert len(crew.given) == 2


def test_time_ends_it(run: Run) -> None:
    assert run("tcverify.passes:Identity", max_examples=None, max_time=1e-9).stop == "time"


def test_cases_are_tried_first_and_beside_the_programs(run: Run, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path / "corpus", pytest.fail)
    program = reduce_then_norm()
    first = [CorpusCase("mine:Pass", "2 ranks", replace(program, seed=seed), ("a",)) for seed in range(3)]
    crew = Here()
    finished = run("tcverify.passes:SequenceParallel", crew, first=first, corpus=corpus, max_examples=2)
    assert finished.statistics.programs == finished.statistics.passed == 5
    assert [(part.max_examples, len(part.first)) for part in crew.given] == [(0, 3), (2, 0)]
    assert corpus.cases("tcverify.passes:SequenceParallel", "2 ranks")


class InTurn(Here):
    """A crew of two workers, who get the slices by turns."""

    def __init__(self) -> None:
        super().__init__(2)
        self._workers = [self._worker, Worker()]

    def next(self) -> tuple[int, str | None]:
        number, text = self._waiting.pop(0)
        return number, self._workers[number % 2].work(text)

    def close(self) -> None:
        for one in self._workers:
            one.__exit__(None, None, None)


def test_what_workers_reach_is_put_together(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(driver, "RANGE", 2)
    (tmp_path / "mine.py").write_text(PARTS)
    with Guarded(f"{tmp_path / 'mine.py'}:parts", covered=()) as subject:
        finished = run(subject, InTurn(), max_examples=8, coverage=Coverage(subject.files))
    (reached,) = finished.reached
    assert reached.uncalled == ("never",)
    assert (reached.unreached, reached.always_true) == (((10, 10),), ())
    assert unreached_lines(finished.reached) == ["mine.py line 10", "mine.py: a call of never"]


def test_nothing_is_missing_of_a_pass_that_is_reached_as_a_whole(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WHOLE)
    with Guarded(f"{tmp_path / 'mine.py'}:whole", covered=()) as subject:
        finished = run(subject, InTurn(), max_examples=2, coverage=Coverage(subject.files))
    (reached,) = finished.reached
    assert (reached.lines_reached, reached.outcomes_reached) == (reached.lines, 2)
    assert unreached_lines(finished.reached) == []


def test_a_campaign_may_be_silent_for_as_long_as_its_limits_let_it() -> None:
    class Patient:
        timeout = 600.0

    executor: Any = Patient()
    assert longest_silence(20.0, None) > 3 * 5 * 20.0
    assert longest_silence(100.0, None) - longest_silence(20.0, None) > 3 * 5 * 80.0
    assert longest_silence(20.0, executor) - longest_silence(20.0, None) > 3 * 600.0


def slice_of(target: str, place: Path, **options: Any) -> Slice:
    """The first slice of a campaign on two ranks in lockstep."""
    return Slice(
        number=0, drawing=TWO, mesh="2 ranks", target=target, pass_options={}, pass_timeout=20.0, contract=Contract(),
        confirm="none", directory=str(Path.cwd()), report_dir=str(place / "reports"), state_dir=str(place / "state"),
        **{"shrink_time": 1.0, "seed": 1, "earlier": False, **options},
    )  # fmt: skip


def test_a_worker_says_with_each_program_for_how_long_silence_is_normal(tmp_path: Path) -> None:
    beats: list[float] = []
    part = slice_of("tcverify.passes:Identity", tmp_path, max_examples=5)
    with Worker() as worker:
        outcome = SliceOutcome.loads(worker.work(part.dumps(), beat=beats.append))
    assert outcome.statistics.programs == 5
    assert len(beats) >= 5
    assert set(beats) == {longest_silence(20.0, None)}


def test_a_slice_is_searched_as_well_whatever_its_worker_has_done_before(tmp_path: Path) -> None:
    target = "tests.support.searched_passes:cancels_negations"
    part = slice_of(target, tmp_path, checks=["equivalence"], max_examples=100, covered=(), search=True)
    with Worker() as worker:
        first, second = (SliceOutcome.loads(worker.work(part.dumps())) for _ in range(2))
    assert first.statistics.changed > 0
    assert first.statistics.changed == second.statistics.changed
    assert first.reached == second.reached


def test_shares_of_a_searched_campaign_are_large_enough_to_learn_something(run: Run) -> None:
    here = Here(size=2)
    with Guarded("tests.support.searched_passes:cancels_negations", covered=()) as subject:
        finished = run(subject, here, max_examples=210, checks=["equivalence"], search=ProgramSearch(subject, 1))
    assert finished.statistics.programs == 210
    assert [part.max_examples for part in here.given] == [100, 100, 10]
    assert finished.statistics.changed > 0  # no program that is drawn has two negations


def test_files_of_a_pass_that_lie_elsewhere_on_a_worker_are_taken_for_those_here() -> None:
    outcome = SliceOutcome(
        Statistics(), files=["/there/a.py"], reached={CodePoint("/there/a.py", 3), CodePoint("/there/b.py", 1, 0)}
    )
    again = SliceOutcome.loads(outcome.dumps())
    assert set(again.reached_of(["/here/a.py"])) == {CodePoint("/here/a.py", 3), CodePoint("/there/b.py", 1, 0)}


# ------------------------------------------------------------------------------------------------------- what goes wrong


def test_a_lost_slice_is_inconclusive(run: Run) -> None:
    finished = run("tcverify.passes:Identity", Here(size=2, dies=lambda number: number == 0), max_examples=RANGE + 5)
    counts = finished.statistics
    assert (counts.programs, counts.passed, counts.inconclusive) == (RANGE + 5, 5, RANGE)
    assert counts.doubts == {"worker-died": RANGE}


def test_nothing_is_passed_where_all_slices_are_lost(run: Run) -> None:
    finished = run("tcverify.passes:Identity", Here(dies=lambda number: True))
    assert finished.verdict == "nothing tested"
    assert finished.why == "no program passed (20 worker-died)"


def test_a_run_that_only_loses_slices_ends(run: Run) -> None:
    crew = Here(dies=lambda number: True)
    with pytest.raises(ExecutorError, match="slices in a row"):
        run("tcverify.passes:Identity", crew, max_examples=None, max_time=600.0)
    assert len(crew.given) == LOST_LIMIT


def test_what_a_lost_slice_had_found_is_kept(run: Run, tmp_path: Path) -> None:
    """The worker finds something, which is on disk, and dies before it answers."""
    (case, *_) = run("drops_reductions").counterexamples
    crew = Here(dies=lambda number: True)
    plain_submit = crew.submit

    def submit(number: int, text: str) -> None:
        plain_submit(number, text)
        write_counterexample(case, Path(crew.given[-1].report_dir))

    crew.submit = submit  # type: ignore[method-assign]
    finished = run("drops_reductions", crew)
    assert (finished.verdict, [one.id for one in finished.counterexamples]) == ("refuted", [case.id])


def test_an_error_of_a_worker_ends_the_run_and_keeps_what_was_found(run: Run, tmp_path: Path) -> None:
    (case, *_) = run("drops_reductions").counterexamples
    crew, events = Here(size=2), list[Event]()
    outcomes = [
        SliceOutcome(Statistics(), stop="failed", error=PassLoadError("gone")),
        SliceOutcome(Statistics(), found=[case]),
    ]
    crew.next = lambda: (crew._waiting.pop()[0], outcomes.pop(0).dumps())  # type: ignore[method-assign]
    with pytest.raises(PassLoadError, match="gone"):
        run("drops_reductions", crew, events=events, max_examples=2 * RANGE)
    assert [event.counterexample.id for event in events if isinstance(event, FindingFound)] == [case.id]


def test_a_pass_that_a_worker_cannot_load_is_an_error_of_the_run(run: Run, subject: Callable[[str], Guarded]) -> None:
    crew = Here()
    plain_submit = crew.submit
    crew.submit = lambda number, text: plain_submit(number, text.replace("mine.py", "other.py"))  # type: ignore[method-assign]
    with pytest.raises(PassLoadError, match=r"other\.py"):
        run("does_nothing", crew)


def test_a_finding_that_cannot_be_kept_stays_where_the_worker_put_it(run: Run, tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    events: list[Event] = []
    crew = Here()
    plain_next = crew.next

    def closed() -> tuple[int, str | None]:
        answer = plain_next()
        for one in SliceOutcome.loads(answer[1] or "").found:
            (tmp_path / "reports" / one.id).write_text("")  # for root, too: no directory can be made there
        return answer

    crew.next = closed  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="cannot be written"):
        run("drops_reductions", crew, events=events)
    assert any(isinstance(event, FindingFound) for event in events)
    assert list((tmp_path / "reports" / WORKERS_DIR).rglob("counterexample.json"))


def test_what_nobody_told_is_found_by_the_next_run(run: Run, tmp_path: Path) -> None:
    (case, *_) = run("drops_reductions").counterexamples
    left = tmp_path / "other" / WORKERS_DIR
    write_counterexample(case, left / f"{socket.gethostname()}-{2**22 + 1}" / "0")
    write_counterexample(case, left / f"{socket.gethostname()}-1" / "0")  # init lives
    assert [one.id for one in recover_cases(tmp_path / "other")] == [case.id]
    assert (tmp_path / "other" / case.id / "counterexample.json").is_file()
    assert [path.name for path in left.iterdir()] == [f"{socket.gethostname()}-1"]
    assert recover_cases(tmp_path / "other") == []
