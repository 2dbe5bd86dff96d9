"""Process groups across machines: keepers that torchrun starts, here two of them on the loopback interface."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tcverify.errors import ExecutorError, UsageError
from tcverify.execution import ProcessGroupPool, make_executor
from tcverify.execution.process_group.torchrun import PIECE, VARIABLE, Channel, StoreAddress, StoreGroup
from tcverify.execution.process_group.torchrun_keeper import run_keeper
from tests.faults.test_pool_faults import alive, summing, wait_until

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0
ENVIRONMENT = {
    **os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "NO_COLOR": "1", "COLUMNS": "80", "OMP_NUM_THREADS": "1",
}  # fmt: skip

KEEPER = """\
import sys
from tcverify.execution.process_group.torchrun_keeper import serve_keeper
from tcverify.execution.process_group.torchrun import StoreAddress
place = StoreAddress("127.0.0.1", int(sys.argv[1]), "test", 2)
raise SystemExit(serve_keeper(place, int(sys.argv[2]), place.connect(), None))
"""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@pytest.fixture(scope="module")
def place() -> Iterator[StoreAddress]:
    """A store, and two keepers without torchrun."""
    port = free_port()
    where = StoreAddress("127.0.0.1", port, "test", 2)
    store = where.connect(master=True)
    keepers = [subprocess.Popen([sys.executable, "-c", KEEPER, str(port), str(r)], env=ENVIRONMENT) for r in range(2)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, where.dumps())
        try:
            yield where
            for rank in range(2):
                Channel(store, f"keeper/{rank}").put(b'{"exit": true}')
            assert [one.wait(PATIENCE) for one in keepers] == [0, 0]
        finally:
            for one in keepers:
                one.kill()


def test_messages_come_in_order_and_of_any_size(place: StoreAddress) -> None:
    there, here = Channel(place.connect(), "c"), Channel(place.connect(), "c")
    large = os.urandom(2 * PIECE + 1)
    for message in (b"one", b"", large):
        there.put(message)
    assert [here.get(5.0), here.get(5.0), here.get(5.0)] == [b"one", b"", large]
    assert here.get(0.01) is None


def test_what_they_compute_is_what_a_pool_computes_and_a_death_is_told(place: StoreAddress) -> None:
    program = summing(2)
    with ProcessGroupPool(2) as near, ProcessGroupPool(2, start_group=StoreGroup) as far:
        for mine, theirs in zip(near.run(program).ranks, far.run(program).ranks, strict=True):
            assert [t.tolist() for t in mine.outputs] == [t.tolist() for t in theirs.outputs]
        assert far.compare(program, program).deltas == near.compare(program, program).deltas
        pids = far.pids
        long = summing(2, 2000)
        ticket = far.submit(long, long)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(ExecutorError, match="rank 1 died of SIGKILL"):
            far.result(ticket)
        wait_until(lambda: not any(map(alive, pids)))  # the other rank went with it
        assert far.compare(program, program).deltas == near.compare(program, program).deltas
        last = far.pids
    wait_until(lambda: not any(map(alive, last)))


def test_more_ranks_than_torchrun_has_started_are_refused(place: StoreAddress) -> None:
    with pytest.raises(ExecutorError, match="has started 2 processes, fewer than 4 ranks"):
        make_executor("torchrun", 4).run(summing(4))


def test_without_torchrun_there_are_no_such_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UsageError, match="there is no torchrun here"):
        make_executor("torchrun", 2).run(summing(2))
    with pytest.raises(UsageError, match="torchrun has not started this"):
        run_keeper(["run"], {})


@pytest.mark.slow
def test_two_launchers_run_one_campaign(tmp_path: Path) -> None:
    port = free_port()
    command = ["run", "identity", "--world-size", "2", "--max-examples", "4", "--strategy", "structured", "--seed", "1"]

    def launch(node: int) -> subprocess.Popen[str]:
        (tmp_path / str(node)).mkdir()
        return subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(node),
                "--master-addr", "127.0.0.1", "--master-port", str(port), "--local-addr", "127.0.0.1",
                "-m", "tcverify", "worker", *command,
            ],
            cwd=tmp_path / str(node), env={**ENVIRONMENT, "TMPDIR": str(tmp_path)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    launchers = [launch(0), launch(1)]
    try:
        outs = [one.communicate(timeout=PATIENCE)[0] for one in launchers]
    finally:
        for one in launchers:
            one.kill()
    assert [one.returncode for one in launchers] == [0, 0], "\n".join(outs)
    assert "passed: 4 programs (4 passed, 0 refuted, 0 inconclusive)" in outs[0]
    assert "ran 4 in lockstep, 4 on gloo" in outs[0]
    assert "passed" not in outs[1]
