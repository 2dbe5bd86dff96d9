"""What becomes of a campaign when its workers die, or are told to end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tcverify.application import Guarded
from tcverify.campaign import CampaignFinished, CampaignPlan
from tcverify.workers import DividedCampaign, DrawPlan, LocalCrew, pool
from tcverify.workers.worker import longest_silence
from tests import warm

ROOT = Path(__file__).parents[2]
PATIENCE = 200.0

#: A pass that drops the reductions, and takes a nap where there is none to take any more: it says so by a file.
PASSES = """\
import os
import time


def drops_reductions(gm):
    found = [n for n in gm.graph.nodes if n.op == "call_function" and "all_reduce" in str(n.target)]
    for node in found:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def nap(gm, times):
    naps = len([name for name in os.listdir() if name.startswith("nap")])
    if naps < times:
        open(f"nap{naps}", "w").close()
        time.sleep(1000)


def naps_once(gm):
    nap(gm, 1)


def naps_twice(gm):
    nap(gm, 2)


def naps_when_it_has_found(gm):
    import glob

    if glob.glob("reports/.workers/*/*/*/counterexample.json"):
        nap(gm, 1)
    drops_reductions(gm)
"""


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def run(place: Path, crew: LocalCrew, told: list[str], name: str) -> CampaignFinished:
    drawing = DrawPlan("structured", 2)
    plan = CampaignPlan(
        drawing.programs(), "2 ranks", place / "reports", place / "state", max_examples=6, seed=1, earlier=False
    )  # fmt: skip
    with Guarded(f"{place / 'mine.py'}:{name}", timeout=2000.0) as subject:
        return DividedCampaign(subject, plan, drawing, "none", crew, told.append).run()


def require_done_again(finished: CampaignFinished, told: list[str], lost: int) -> None:
    """Assert that a slice was done again, and given up when that worker was lost too."""
    ends = ["its slice is repeated", "its slice is abandoned"]
    assert [line.rpartition("; ")[2] for line in told] == ends[:lost]
    counts = finished.statistics
    if lost == 1:
        assert (counts.programs, counts.passed, counts.inconclusive) == (6, 6, 0)
    else:
        assert (finished.verdict, counts.doubts) == ("nothing tested", {"worker-died": 6})


@pytest.mark.fault(
    "a worker of `--workers` is killed (−9)",
    "another one does its slice again; if that one dies, too, the slice is inconclusive (`worker-died`); "
    "what it had found is told",
)
@pytest.mark.parametrize("naps", [["nap0"], pytest.param(["nap0", "nap1"], marks=pytest.mark.slow)], ids=len)
def test_a_worker_that_is_killed_costs_no_program_and_one_that_dies_again_its_slice(
    naps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PASSES)
    told: list[str] = []
    killed: list[int] = []

    def kill() -> None:
        for nap in naps:
            wait_until((tmp_path / nap).exists)
            killed.extend(crew.pids)
            os.kill(crew.pids[0], signal.SIGKILL)

    with LocalCrew(1, told.append) as crew:
        killer = threading.Thread(target=kill)
        killer.start()
        finished = run(tmp_path, crew, told, ("naps_once", "naps_twice")[len(naps) - 1])
        killer.join()
    require_done_again(finished, told, len(naps))
    assert all("died of SIGKILL" in line for line in told)
    assert not any(map(alive, killed))
    assert crew.pids == []


def ends_at_once(connection: Connection, place: int) -> None:
    os._exit(3)


@pytest.mark.fault(
    "workers of `--workers` die as soon as they are started, as where there is no memory for them",
    "two are started for each slice, which is inconclusive then (`worker-died`); the run ends",
)
def test_workers_that_die_before_they_take_anything_cost_their_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PASSES)
    monkeypatch.setattr(pool, "serve_worker", ends_at_once)
    monkeypatch.setattr(
        pool, "limit_blocking", lambda connection, seconds: connection.poll(PATIENCE)
    )  # until it has ended
    told: list[str] = []
    with LocalCrew(2, told.append) as crew:
        lost = run(tmp_path, crew, told, "naps_once")
        assert crew.pids == []
    assert (lost.verdict, lost.statistics.doubts) == ("nothing tested", {"worker-died": 6})
    assert set(told) == {"a worker exited with code 3 before it took a slice; the slice is abandoned"}


@pytest.mark.fault(
    "a worker of `--workers` stops (−STOP)",
    "it is killed when it has said nothing for longer than the limits of its pass, its executor and its messages add up to; "
    "another one does its slice again; if that one stops, too, the slice is inconclusive (`worker-died`)",
)
@pytest.mark.parametrize("naps", [["nap1"], pytest.param(["nap0", "nap1"], marks=pytest.mark.slow)], ids=len)
def test_a_worker_that_stops_is_killed_and_its_slice_done_again(
    naps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(PASSES)
    told: list[str] = []
    stopped: list[int] = []

    def stop() -> None:
        for nap in naps:
            wait_until((tmp_path / nap).exists)
            (worker,) = (one for one in crew._workers if one is not None)
            stopped.append(worker.process.pid or 0)
            os.kill(stopped[-1], signal.SIGSTOP)
            patience.append(worker.patience)

            def given_up(worker: object = worker) -> bool:
                worker.patience = 1.0  # type: ignore[attr-defined]  # what it said itself would take half an hour
                return worker not in crew._workers

            wait_until(given_up)

    patience: list[float] = []
    with LocalCrew(1, told.append) as crew:
        if "nap0" not in naps:
            (tmp_path / "nap0").write_text("")  # has been taken
        stopper = threading.Thread(target=stop)
        stopper.start()
        finished = run(tmp_path, crew, told, "naps_twice")
        stopper.join()
    require_done_again(finished, told, len(naps))
    assert all("was silent for 1 s and was killed" in line for line in told)
    assert patience[0] == longest_silence(2000.0, None)
    assert len(set(stopped)) == len(naps)
    assert not any(map(alive, stopped))


def start(place: Path, *arguments: str) -> warm.Started:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "80"}
    return warm.start("-m", "tcverify", "run", *arguments, cwd=place, env=environment, stderr=subprocess.STDOUT)


def session(leader: int) -> list[int]:
    """The living processes of a session."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and os.getsid(int(entry.name)) == leader and alive(int(entry.name)):
                found.append(int(entry.name))
        except OSError:
            pass
    return found


def test_an_interrupt_ends_all_workers_and_keeps_what_they_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PASSES)
    options = ["--world-size", "2", "--confirm", "none", "--strategy", "structured", "--seed", "1", "--workers", "2"]
    process = start(
        tmp_path, "mine.py:naps_when_it_has_found", *options, "--pass-timeout", "2000", "--shrink-time", "1",
        "--max-examples", "100", "--report", "ndjson",
    )  # fmt: skip
    try:
        wait_until(lambda: (tmp_path / "nap0").exists() or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130, out
    assert "Traceback" not in out
    assert "interrupted" in out
    assert list((tmp_path / "reports").glob("*/counterexample.json"))
    assert not (tmp_path / "reports" / ".workers").exists()
    wait_until(lambda: not session(process.pid))


@pytest.mark.slow
def test_workers_and_what_they_started_end_with_a_killed_driver(tmp_path: Path) -> None:
    """And what they had found is told by the next run."""
    (tmp_path / "mine.py").write_text(PASSES)
    options = ["--world-size", "2", "--confirm", "none", "--strategy", "structured", "--seed", "1", "--workers", "2"]
    process = start(
        tmp_path, "mine.py:naps_when_it_has_found", *options, "--pass-timeout", "2000", "--shrink-time", "1",
        "--max-examples", "100",
    )  # fmt: skip
    wait_until(lambda: (tmp_path / "nap0").exists() or process.poll() is not None)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=PATIENCE)
    wait_until(lambda: not session(process.pid))
    again = start(tmp_path, "identity", "--world-size", "2", "--confirm", "none", "--max-examples", "1")
    out, _ = again.communicate(timeout=PATIENCE)
    assert again.returncode == 0, out
    assert "An earlier run died before it told what a worker had found" in out
    assert list((tmp_path / "reports").glob("*/counterexample.json"))
