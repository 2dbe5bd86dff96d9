"""Campaigns on real Ray clusters of this machine: what they count, and what becomes of them when workers and machines go.

`tox -e ray` runs these; ray is an extra.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tcverify.application import Guarded
from tcverify.campaign import CampaignFinished, CampaignPlan
from tcverify.domains import FLOAT64
from tcverify.errors import ExecutorError, UsageError
from tcverify.execution import ProcessGroupPool
from tcverify.program import Mesh
from tcverify.ray import ray_crew
from tcverify.workers import DividedCampaign, DrawPlan, driver
from tests.support.programs import reduce_then_norm

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0

ray = pytest.importorskip("ray", reason="ray is missing: pip install 'tcverify[ray]'")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # ray's own
    pytest.mark.timeout(900),
]

PASSES = """\
import glob
import multiprocessing
import os
import time


def changes(gm):
    for node in [n for n in gm.graph.nodes if n.op == "output"]:
        first = next(n for n in gm.graph.nodes if n.op == "placeholder")
        with gm.graph.inserting_before(node):
            gm.graph.call_function(__import__("torch").ops.aten.neg.default, (first,))


def drops_reductions(gm):
    for node in [n for n in gm.graph.nodes if n.op == "call_function" and "all_reduce" in str(n.target)]:
        node.replace_all_uses_with(node.args[0])
        gm.graph.erase_node(node)


def naps_when_it_has_found(gm):
    if glob.glob("reports/.workers/*/*/*/counterexample.json"):
        naps(gm)
    drops_reductions(gm)


def naps(gm):
    worker = multiprocessing.parent_process().pid
    if os.path.exists("wanted") and not os.path.exists("go"):
        with open(f"nap-{worker}", "w"):
            pass
        while not os.path.exists("go"):
            time.sleep(0.05)
"""


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with the passes; slices are of 5 programs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of workers
    monkeypatch.setattr(driver, "RANGE", 5)
    (tmp_path / "mine.py").write_text(PASSES)
    return tmp_path


def run(
    place: Path, name: str, address: str, told: list[str], programs: int, confirm: str = "none"
) -> CampaignFinished:
    drawing = DrawPlan("structured", 2)
    plan = CampaignPlan(
        drawing.programs(), "2 ranks", place / "reports", place / "state", max_examples=programs, seed=1, earlier=False,
        shrink_time=1.0,
    )  # fmt: skip
    target = name if ":" in name else f"{place / 'mine.py'}:{name}"
    with Guarded(target, timeout=2000.0) as subject, ray_crew(address, 2, told.append) as crew:
        return DividedCampaign(subject, plan, drawing, confirm, crew, told.append).run()


def nappers(place: Path) -> list[int]:
    """Process ids of the workers whose passes nap."""
    return [int(path.name.removeprefix("nap-")) for path in place.glob("nap-*")]


def test_a_campaign_on_a_cluster_of_this_machine(place: Path) -> None:
    told: list[str] = []
    finished = run(place, "tcverify.passes:Identity", "local", told, 12, "gloo")
    counts = finished.statistics
    assert (finished.verdict, counts.programs, counts.passed) == ("passed", 12, 12)
    assert counts.ran == {"lockstep": 12, "gloo": 12}
    assert told == []
    assert not ray.is_initialized()


def test_a_worker_that_is_killed_costs_no_program(place: Path) -> None:
    (place / "wanted").touch()
    told: list[str] = []

    def kill() -> None:
        wait_until(lambda: nappers(place))
        os.kill(nappers(place)[0], signal.SIGKILL)
        (place / "go").touch()

    killer = threading.Thread(target=kill)
    killer.start()
    counts = run(place, "naps", "local", told, 10).statistics
    killer.join()
    assert (counts.programs, counts.passed, counts.inconclusive) == (10, 10, 0)
    (line,) = told
    assert "is done again" in line


@pytest.fixture
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    yield made
    ray.shutdown()
    made.shutdown()


def test_a_machine_may_leave(place: Path, cluster: Any) -> None:
    leaving = cluster.add_node(num_cpus=1)
    (place / "wanted").touch()
    told: list[str] = []

    def leave() -> None:
        try:
            wait_until(lambda: len(nappers(place)) == 2)  # a slice on each machine
            cluster.remove_node(leaving, allow_graceful=False)
        finally:
            (place / "go").touch()

    leaver = threading.Thread(target=leave)
    leaver.start()
    counts = run(place, "naps", cluster.address, told, 15).statistics
    leaver.join()
    assert (counts.programs, counts.passed, counts.inconclusive) == (15, 15, 0)
    assert [line for line in told if "is done again" in line]


def test_a_machine_may_join(place: Path, cluster: Any) -> None:
    with ray_crew(cluster.address, None, pytest.fail) as crew:
        assert crew.size == 1
        cluster.add_node(num_cpus=1)
        wait_until(lambda: crew.size == 2)


def test_pools_that_are_actors_compute_what_pools_compute_and_come_back(place: Path) -> None:
    from tcverify.ray.pools import ray_executors

    program, large = reduce_then_norm(), reduce_then_norm(Mesh.grid({"tp": 4}))
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        with ray_executors("gloo") as executor_of, ProcessGroupPool(2) as pool:
            remote = executor_of(2)
            assert remote is not None
            mine, theirs = pool.run(program, observe=True), remote.run(program, observe=True)
            for one, other in zip(mine.ranks, theirs.ranks, strict=True):
                assert [a.tolist() for a in one.outputs] == [b.tolist() for b in other.outputs]
                assert list(one.values or {}) == list(other.values or {})
            local, far = pool.compare(program, program), remote.compare(program, program, FLOAT64)
            assert far.deltas == local.deltas
            for one, other in zip(local.original.ranks, far.original.ranks, strict=True):
                assert [list(pair) for pair in one.digest] == [list(pair) for pair in other.digest]
            with pytest.raises(UsageError, match="cannot run on a pool of 2"):
                remote.compare(large, large)
            ray.kill(remote._actor, no_restart=False)
            wait_until(lambda: _works(remote, program))
    finally:
        ray.shutdown()


def _works(remote: Any, program: object) -> bool:
    """Nothing but an ExecutorError comes of the death of the actor, and that not for long."""
    try:
        return not remote.compare(program, program).deltas[0].worst
    except ExecutorError:
        return False


def test_the_command_line(place: Path) -> None:
    finished = subprocess.run(
        [
            sys.executable, "-m", "tcverify", "run", "mine.py:drops_reductions", "--world-size", "2", "--max-examples", "30",
            "--strategy", "structured", "--shrink-time", "1", "--seed", "1", "--workers", "2", "--ray",
        ],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE, check=False,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "80"},
    )  # fmt: skip
    assert finished.returncode == 1, finished.stdout
    assert "refuted: 30 programs" in finished.stdout
    assert list((place / "reports").glob("*/counterexample.json"))
    assert not (place / "reports" / driver.WORKERS_DIR).exists()


def test_an_interrupt_ends_the_slices_and_keeps_what_they_found(place: Path) -> None:
    """One Ctrl-C, while both workers wait for a pass that would never end."""
    (place / "wanted").touch()
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tcverify", "run", "mine.py:naps_when_it_has_found", "--world-size", "2", "--confirm", "none",
            "--max-examples", "100", "--strategy", "structured", "--shrink-time", "1", "--seed", "1", "--pass-timeout", "2000",
            "--workers", "2", "--ray", "local",
        ],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "80"},
    )  # fmt: skip
    try:
        wait_until(lambda: nappers(place) or process.poll() is not None)
        os.kill(process.pid, signal.SIGINT)
        out, _ = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        (place / "go").touch()
    assert process.returncode == 130, out
    assert "interrupted" in out
    assert "wrong-value" in out
    assert list((place / "reports").glob("*/counterexample.json"))
    assert not (place / "reports" / driver.WORKERS_DIR).exists()


def test_a_cluster_that_is_not_there_is_said() -> None:
    with pytest.raises(UsageError, match=r"--ray 127\.0\.0\.1:1"), ray_crew("127.0.0.1:1", None, pytest.fail):
        pass
