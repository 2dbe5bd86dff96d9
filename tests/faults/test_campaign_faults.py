"""What a run has found outlives whatever happens to the run."""

from __future__ import annotations

import hashlib
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from torch import fx

from tcverify.application import Guarded, InProcess
from tcverify.application.loading import prepare_pass
from tcverify.campaign import Campaign, CampaignFinished, CampaignPlan, Corpus, Event, FindingFound, Progress
from tcverify.campaign.in_flight import read_in_flight
from tcverify.cases.baseline import pass_reference, read_baseline
from tcverify.cases.counterexample import FILE_NAME, read_counterexample
from tcverify.errors import UsageError
from tcverify.program import Program
from tcverify.strategies import transformer_programs
from tests import warm
from tests.faults.processes import ROOT, alive, descendants, left, wait_until
from tests.support.programs import reduce_then_norm


def raises(gm: fx.GraphModule) -> None:
    if any("all_reduce" in str(node.target) for node in gm.graph.nodes):
        raise ValueError("no idea")


def reports_differently(gm: fx.GraphModule) -> Any:
    """Fails in two ways, by the number of nodes."""
    if len(gm.graph.nodes) % 2:
        raise ValueError("odd")
    return 42


def campaign(
    tmp_path: Path,
    pass_: Any = raises,
    *,
    programs: st.SearchStrategy[Program] | None = None,
    subscribers: tuple[Callable[[Event], None], ...] = (),
    **options: Any,
) -> Campaign:
    subject = pass_ if isinstance(pass_, Guarded) else InProcess(prepare_pass(pass_, "", {}))
    plan = CampaignPlan(
        st.just(reduce_then_norm()) if programs is None else programs, "2 ranks", tmp_path / "reports", tmp_path / "state",
        **{"max_examples": 5, "shrink_time": 2.0, **options},
    )  # fmt: skip
    return Campaign(subject, plan, None, subscribers)


def kept(tmp_path: Path) -> list[str]:
    """The kinds of the counterexamples that are on disk, each readable."""
    found = [read_counterexample(path) for path in (tmp_path / "reports").glob(f"*/{FILE_NAME}")]
    return sorted(case.finding.kind for case in found)


# ------------------------------------------------------------------------------------------------------------ full disks


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    """No file grows beyond so many bytes: writes fail half-way, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.fault(
    "the disk is full while a run writes what it has found",
    "the finding is shown whole before the run ends with code 2 and names the file; nothing half-written is left",
)
def test_what_cannot_be_written_is_told(tmp_path: Path) -> None:
    told: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, FindingFound):
            told.append(event.counterexample.finding.kind)

    # What is being verified takes 2.5 kB, its counterexample 3.2 kB.
    with files_limited_to(2900), pytest.raises(UsageError, match="cannot be written"):
        campaign(tmp_path, subscribers=(listen,)).run()
    assert told == ["pass-raised"]
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_of_several_findings_that_cannot_be_written_each_is_told(tmp_path: Path) -> None:
    """An interrupt comes while findings of several kinds wait to be shrunk."""
    told: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, FindingFound):
            told.append(event.counterexample.finding.kind)
        if isinstance(event, Progress) and event.phase.startswith("shrinking"):
            raise KeyboardInterrupt

    one = campaign(
        tmp_path,
        reports_differently,
        programs=transformer_programs(world_size=2),
        max_examples=30,
        subscribers=(listen,),
    )
    (tmp_path / "reports").write_text("a file, where a directory should be")
    with pytest.raises(UsageError, match="cannot be written"):
        one.run()
    assert told
    assert len(set(told)) == len(told)


# ---------------------------------------------------------------------------------------------------------- interrupted


@pytest.mark.fault(
    "Ctrl-C twice, and more often", "the first ends the run, which keeps what it has found; the rest are ignored"
)
def test_an_interrupt_while_what_was_found_is_kept_loses_nothing(tmp_path: Path) -> None:
    def listen(event: Event) -> None:
        if isinstance(event, Progress) and event.statistics.shrinking == 2:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        if isinstance(event, FindingFound):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)  # the interpreter looks for signals

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        finished = campaign(tmp_path, programs=transformer_programs(world_size=2), subscribers=(listen,)).run()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (finished.stop, finished.verdict) == ("interrupted", "refuted")
    assert kept(tmp_path) == ["pass-raised"]
    assert not list((tmp_path / "state").glob("in-flight*"))


DIES_WHILE_SHRINKING = """
import os, signal
from pathlib import Path
from tcverify.campaign import Progress
from tests.faults.test_campaign_faults import campaign, raises
from tcverify.strategies import transformer_programs

def listen(event):
    if isinstance(event, Progress) and event.phase.startswith("shrinking"):
        os.kill(os.getpid(), signal.SIGKILL)

campaign(Path("."), programs=transformer_programs(world_size=2), subscribers=(listen,)).run()
"""


@pytest.mark.fault(
    "the run is killed (−9) while it shrinks a finding",
    "the next run on the same pass begins with the program that showed it, and shrinks it; the program that was being "
    "tried is kept as `crashed-….json`",
)
def test_a_finding_that_was_being_shrunk_is_found_again(tmp_path: Path) -> None:
    code, _, err = warm.run("-c", DIES_WHILE_SHRINKING, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert code == -signal.SIGKILL, err
    assert kept(tmp_path) == []
    again = campaign(tmp_path, programs=st.nothing(), max_examples=3, shrink_time=20.0)
    finished = again.run()
    (case,) = finished.counterexamples
    assert case.program.size < case.size_drawn  # shrunk by the second run
    assert len(list(tmp_path.glob(f"state/failures/*/*/{FILE_NAME}"))) == 1  # as it was drawn, it is no longer needed


# ------------------------------------------------------------------------------------------- several runs, damaged files

TWICE = """
import sys
from pathlib import Path
from tests.faults.test_campaign_faults import campaign
print(campaign(Path("."), seed=int(sys.argv[1]), max_examples=200).run().verdict)
"""


@pytest.mark.slow
@pytest.mark.fault(
    "two runs in one directory",
    "each keeps all that it finds; cases of the same name are the same, and never half-written",
)
def test_two_campaigns_in_one_directory(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    running = [warm.start("-c", TWICE, str(seed), cwd=tmp_path, env=environment) for seed in (1, 2)]
    assert [warm.finish(process)[1] for process in running] == ["refuted\n", "refuted\n"]
    assert kept(tmp_path) == ["pass-raised"]
    assert [path for path in tmp_path.rglob(".*")] == []
    assert not list((tmp_path / "state").glob("in-flight*"))


@pytest.mark.fault(
    "counterexamples, baselines and state of earlier runs that are damaged",
    "a case that is no longer readable is left out, and replaced when it is found again; a damaged baseline ends the run "
    "before it begins, and is not overwritten",
)
@pytest.mark.parametrize(
    "damage", [b"", b"{", b"\xff\x00", b"null", b'{"format": "tcverify-counterexample", "version": 1}']
)
def test_damaged_files_of_earlier_runs(tmp_path: Path, damage: bytes) -> None:
    first = campaign(tmp_path, shrink_time=60.0).run()  # to the end, so that both are the same
    for path in [*tmp_path.rglob(FILE_NAME)]:
        path.write_bytes(damage)
    again = campaign(tmp_path, shrink_time=60.0).run()
    assert [case.id for case in again.counterexamples] == [case.id for case in first.counterexamples]
    assert kept(tmp_path) == ["pass-raised"]
    baseline = tmp_path / "known.json"
    baseline.write_bytes(damage)
    with pytest.raises(UsageError, match=r"known\.json, line 1"):
        read_baseline(baseline)


@pytest.mark.fault(
    "a corpus with files that are damaged, of a newer tcverify, or no cases at all",
    "each is named and left out; the others are tried, and what was found is found again",
)
def test_a_corpus_that_is_damaged_in_all_ways(tmp_path: Path) -> None:
    told: list[str] = []
    corpus = Corpus(tmp_path / "corpus", told.append)
    found = campaign(tmp_path, corpus=corpus, earlier=False).run().counterexamples
    (path,) = [path for path in corpus.directory.iterdir() if b'"pass-raised"' in path.read_bytes()]
    text = path.read_bytes()
    newer = text.replace(b'"version":1', b'"version":2', 1).replace(b'"kind"', b'"later":[],"kind"', 1)
    bad = [
        (text[: len(text) // 2], None), (newer, hashlib.sha256(newer).hexdigest()[:32]), (text, "0" * 32), (b"", "1" * 32),
        (b"notes", "notes"),
    ]  # fmt: skip
    names = []
    for number, (content, name) in enumerate(bad):
        names.append(f"{name or f'{number + 2}' * 32}.json")
        (corpus.directory / names[-1]).write_bytes(content)
    names += ["a" * 32 + ".json", "b" * 32 + ".json"]
    (corpus.directory / names[-2]).mkdir()
    os.mkfifo(corpus.directory / names[-1])
    before = sorted(corpus.directory.iterdir())
    again = Corpus(tmp_path / "corpus", told.append)
    first = again.cases(pass_reference(campaign(tmp_path).subject.facts), "2 ranks")
    assert len(told) == len(names)
    assert all(any(name in line and "skipped" in line for line in told) for name in names)
    finished = campaign(tmp_path, corpus=again, first=first, earlier=False, max_examples=0).run()
    assert [case.id for case in finished.counterexamples] == [case.id for case in found]
    assert finished.verdict == "refuted"
    assert sorted(corpus.directory.iterdir()) == before  # nobody changes or removes them
    assert len(told) == len(names)


# ------------------------------------------------------------------------------------------------------------- the clock


@pytest.mark.fault("the clock of the machine jumps", "nothing: every limit is on the monotonic clock")
@pytest.mark.parametrize("jump", [-1e9, 1e9])
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    real = time.time
    calls: list[int] = []

    def jumping() -> float:
        calls.append(1)
        return real() + jump * len(calls)

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.fromtimestamp(max(0.0, min(4e9, jumping())), tz)

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr("tcverify.report.ndjson.datetime", Jumping)
    finished: CampaignFinished = campaign(tmp_path, max_examples=None, max_time=100.0).run()
    assert (finished.stop, finished.verdict) == ("exhausted", "refuted")
    assert 0 <= finished.statistics.elapsed < 100


# --------------------------------------------------------------------------------------------------------- a whole run


@pytest.mark.slow
def test_a_whole_run_on_gloo_that_is_killed_leaves_nothing(tmp_path: Path, place: Path) -> None:
    """The command line, with ranks, workers and fork server, killed when it is verifying."""
    command = [
        sys.executable,
        "-m",
        "tcverify",
        "run",
        "sequence_parallel",
        "--world-size",
        "2",
        "--max-examples",
        "100000",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    with process:
        wait_until(lambda: bool(list(tmp_path.glob(".tcverify/in-flight-*.json"))), 200)
        started = descendants(process.pid)
        assert left(place)
        assert len(started) >= 4  # two ranks, a worker, the fork server
        process.kill()
    wait_until(lambda: not any(alive(pid) for pid in started))
    wait_until(lambda: left(place) == [])
    (note,) = tmp_path.glob(".tcverify/in-flight-*.json")
    assert read_in_flight(note).finding.kind == "run-died"


RANKS = """
from tcverify.errors import ExecutorError
from tcverify.execution import ProcessGroupPool
from tests.support.programs import reduce_then_norm

with ProcessGroupPool(2) as pool:
    try:
        pool.run(reduce_then_norm())
    except ExecutorError as error:
        print(error.message)
"""


@pytest.mark.fault(
    "the system starts no more processes, or kills what they are forked from",
    "ranks: `executor-failed`, and new ones when it does again; passes and workers: the run ends with code 2 and says so",
)
def test_where_no_process_starts_this_is_said(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os\nif b'forkserver' in open('/proc/self/cmdline', 'rb').read():\n    os._exit(9)\n"
    )

    def ended(*arguments: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
            capture_output=True, text=True, timeout=200, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr.partition("\n")[0]

    why = "a process cannot be started: what it is forked from has ended"
    run = ["-m", "tcverify", "run", "identity", "--strategy", "structured"]
    assert ended(*run) == (2, "", f"Error: {why}")
    assert ended(*run, "--workers", "2") == (2, "", f"Error: {why}")
    assert ended("-c", RANKS) == (0, f"the processes of the group cannot be started: {why}\n", "")
