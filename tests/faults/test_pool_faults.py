"""What a process-group pool does when ranks die, stop, or wait for each other."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tcverify import verify
from tcverify.application import InProcess
from tcverify.application.loading import prepare_pass
from tcverify.errors import ExecutorError
from tcverify.execution import ProcessGroupPool
from tcverify.execution.process_group import processes
from tcverify.program import VARYING, GraphBuilder, InputSpec, Mesh, Program, RankBinding, spmd_program
from tcverify.system import scratch
from tests.faults import passes
from tests.faults.processes import PATIENCE, ROOT, alive, descendants, left, wait_until

X = InputSpec("x", (4, 4), placements=(("tp", VARYING),))


def summing(world_size: int = 2, layers: int = 1) -> Program:
    def build(b: GraphBuilder) -> Any:
        x = b.input("x")
        for _ in range(layers):
            x = b.call("tensor_cast::all_reduce", x, b.rank, b.group("tp"))
        return x

    return spmd_program(Mesh.grid({"tp": world_size}), [X], build)


def raising_on(ranks: Sequence[int], world_size: int = 2) -> Program:
    """A node before the collective raises on some ranks; the others wait for them in the collective."""

    def build(b: GraphBuilder) -> Any:
        row = b.call("aten::select.int", b.input("x"), 0, b.constant("index", lambda rank: 0))
        return b.call("tensor_cast::all_reduce", row, b.rank, b.group("tp"))

    program = spmd_program(Mesh.grid({"tp": world_size}), [X], build)
    constants = [{**b.constants, "index": 99 if rank in ranks else 0} for rank, b in enumerate(program.ranks)]
    return replace(program, ranks=tuple(RankBinding(0, c) for c in constants))


@pytest.fixture
def own_pool() -> Iterator[ProcessGroupPool]:
    """A pool that a test may break."""
    with ProcessGroupPool(2, timeout=30) as pool:
        yield pool


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


# --------------------------------------------------------------------------------------------------------------- death


@pytest.mark.fault(
    "a rank is killed (−9) in a collective",
    "noticed at once, by name; the program is inconclusive (`executor-failed`), new ranks run the next one",
)
def test_a_rank_killed_in_the_middle_of_a_program_is_named(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    victim = own_pool.pids[1]
    os.kill(victim, signal.SIGSTOP)  # so that the program is under way when the rank dies
    timer = threading.Timer(0.3, os.kill, (victim, signal.SIGKILL))
    timer.start()
    with pytest.raises(ExecutorError, match=r"rank 1 died of SIGKILL, while running program [0-9a-f]{16}"):
        own_pool.run(summing())
    timer.join()


def test_the_pool_works_again_after_a_death(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    before = own_pool.pids
    os.kill(before[0], signal.SIGKILL)
    with contextlib.suppress(ExecutorError):  # the pool may or may not have noticed when the program comes
        own_pool.run(summing())
    assert own_pool.run(summing()).finished
    assert set(own_pool.pids).isdisjoint(before)


def test_a_death_between_programs_costs_no_program(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    victim = own_pool.pids[0]
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: not alive(victim))
    time.sleep(0.2)  # the fork server reaps it and tells us
    assert own_pool.run(summing()).finished


def test_the_other_ranks_die_too(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    first, second = own_pool.pids
    with stopped(first):
        ticket = own_pool.submit(summing(), summing())
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ExecutorError, match="rank 0 died of SIGKILL"):
            own_pool.result(ticket)
    wait_until(lambda: not alive(first) and not alive(second))


def test_programs_behind_the_one_that_failed_are_run_by_new_ranks(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    victim = own_pool.pids[1]
    with stopped(victim):
        tickets = [own_pool.submit(summing(layers=n), summing(layers=n)) for n in (1, 2, 3)]
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(ExecutorError):
            own_pool.result(tickets[0])
    assert [len(own_pool.result(t).original.ranks[0].calls) for t in tickets[1:]] == [2, 3]


def test_a_crash_brings_the_last_words_of_the_rank(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    other, victim = own_pool.pids
    with stopped(other):  # so that the victim waits in a collective, whichever of its threads takes the signal
        ticket = own_pool.submit(summing(), summing())
        os.kill(victim, signal.SIGSEGV)
        with pytest.raises(ExecutorError, match=r"rank 1 died of SIGSEGV .*Segmentation fault"):
            own_pool.result(ticket)


# ------------------------------------------------------------------------------------------------------------ the clock


@pytest.mark.fault("a rank stops (−STOP)", "`executor-failed` after the time-out of the pool; all ranks are replaced")
def test_a_rank_that_stops_is_a_time_out_that_names_the_program() -> None:
    with ProcessGroupPool(2, timeout=4) as pool:  # enough for new ranks on a machine that is busy
        pool.run(summing())
        with (
            stopped(pool.pids[1]),
            pytest.raises(ExecutorError, match=r"had not answered after 4 s, .* program [0-9a-f]"),
        ):
            pool.run(summing())
        assert pool.run(summing()).finished


@pytest.mark.slow
@pytest.mark.fault("the run is killed (−9) while a rank is stopped", "the system kills the rank")
def test_a_stopped_rank_ends_with_its_parent(place: Path) -> None:
    with script(place, "wait") as process:
        assert process.stdout is not None
        process.stdout.readline()
        ranks = [int(pid) for pid in process.stdout.readline().split()[:2]]
        os.kill(ranks[0], signal.SIGSTOP)
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
        wait_until(lambda: not any(alive(pid) for pid in ranks))
    wait_until(lambda: left(place) == [])


@pytest.mark.fault("a rank is slow", "nothing, within the time-out of the pool")
def test_a_slow_rank_is_waited_for(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    ranks = own_pool.pids
    ticket = own_pool.submit(summing(layers=200), summing(layers=200))
    for _ in range(5):
        with stopped(ranks[1]):
            time.sleep(0.1)
    assert own_pool.result(ticket).rewritten.finished
    assert own_pool.pids == ranks


@pytest.mark.fault(
    "a rank is out of memory",
    "`executor-failed`, which names rank and node, and not a finding: the program has run in lockstep; all ranks are replaced",
)
def test_a_rank_out_of_memory_refutes_nothing(own_pool: ProcessGroupPool) -> None:
    def build(b: GraphBuilder) -> Any:
        total = b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
        return total, b.call("aten::sum.default", b.call("aten::full.default", [1 << 24], 0.0))

    program = spmd_program(Mesh.grid({"tp": 2}), [X], build)
    own_pool.run(summing())
    (size,) = [int(pages) for pages in Path(f"/proc/{own_pool.pids[1]}/statm").read_text().split()[:1]]
    limit = size * resource.getpagesize() + (32 << 20)
    resource.prlimit(own_pool.pids[1], resource.RLIMIT_AS, (limit, limit))
    verdict = verify(InProcess(prepare_pass(passes.does_nothing, "", {})), program, confirm=own_pool)
    assert (verdict.status, [doubt.reason for doubt in verdict.doubts]) == ("inconclusive", ["executor-failed"])
    assert "on rank 1, node 'full" in verdict.doubts[0].detail
    assert "out of memory" in verdict.doubts[0].detail
    assert verify(InProcess(prepare_pass(passes.does_nothing, "", {})), program, confirm=own_pool).status == "passed"


def test_a_rank_that_stops_before_a_large_request_is_a_time_out() -> None:
    with ProcessGroupPool(2, timeout=2) as pool:
        pool.run(summing())
        large = summing(layers=3000)
        with stopped(pool.pids[1]), pytest.raises(ExecutorError, match="had not answered"):
            pool.compare(large, large)
        assert pool.run(summing()).finished


def test_ranks_that_do_not_start_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_SECONDS", 0.0)
    with ProcessGroupPool(2) as pool, pytest.raises(ExecutorError, match="ranks 0 and 1 did not join"):
        pool.run(summing())


def test_a_rank_that_cannot_join_says_why(own_pool: ProcessGroupPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_pool, "device", "cuda")  # past the parent's own check, to a rank without a device
    monkeypatch.setattr(processes, "_check_backend", lambda device, world_size: None)
    with pytest.raises(ExecutorError, match=r"rank \d cannot join the process group: \w+"):
        own_pool.run(summing())


# --------------------------------------------------------------------------------------------- programs that hang by raising


@pytest.mark.fault(
    "a kernel raises on one rank while the others wait for it",
    "seen as what the program does; the others are given half a second, then replaced",
)
def test_a_node_that_raises_on_one_rank_is_an_observation(own_pool: ProcessGroupPool) -> None:
    run = own_pool.run(raising_on([1]))
    assert not run.finished
    assert run.ranks[1].error is not None
    assert run.ranks[1].error.node == "select"
    assert run.ranks[0].error is None
    assert run.ranks[0].outputs == []


def test_the_pool_works_after_a_node_raised_on_one_rank(own_pool: ProcessGroupPool) -> None:
    tickets = [own_pool.submit(raising_on([]), raising_on([0])), own_pool.submit(summing(), summing())]
    blamed = own_pool.result(tickets[0])
    assert blamed.rewritten.ranks[0].error is not None
    assert blamed.deltas == []
    assert own_pool.result(tickets[1]).original.finished


# ----------------------------------------------------------------------------------------------------------- no traces


def groups() -> set[Path]:
    """The directories of the groups of this process."""
    return set(Path(scratch.directory()).glob("group-*"))


def test_close_leaves_no_file_and_no_process(own_pool: ProcessGroupPool) -> None:
    before = groups()
    own_pool.run(summing())
    ranks = own_pool.pids
    assert len(ranks) == 2
    made = groups() - before
    assert [path.stat().st_mode & 0o777 for path in (*made, Path(scratch.directory()))] == [0o700, 0o700]
    own_pool.close()
    assert groups() == before
    assert own_pool.pids == []
    wait_until(lambda: not any(alive(pid) for pid in ranks))


def test_a_closed_pool_fails_what_was_in_flight(own_pool: ProcessGroupPool) -> None:
    ticket = own_pool.submit(summing(), summing())
    own_pool.close()
    with pytest.raises(ExecutorError, match="closed"):
        own_pool.result(ticket)


def test_a_forgotten_pool_takes_its_ranks_along() -> None:
    before = groups()
    pool = ProcessGroupPool(2)
    pool.run(summing())
    ranks = pool.pids
    del pool
    wait_until(lambda: not any(alive(pid) for pid in ranks))
    assert groups() == before


#: No `if __name__ == "__main__"`, and so it would start pools without end if ranks imported it.
SCRIPT = """
import sys
from tcverify import PARTIAL, InputSpec, Mesh, ProcessGroupPool, spmd_program
print("running", flush=True)
x = InputSpec("x", (4,), placements=(("tp", PARTIAL),))
build = lambda b: b.call("tensor_cast::all_reduce", b.input("x"), b.rank, b.group("tp"))
pool = ProcessGroupPool(2)
run = pool.run(spmd_program(Mesh.grid({"tp": 2}), [x], build))
print(*pool.pids, run.finished, flush=True)
if sys.argv[1] == "wait":
    sys.stdin.read()
"""


@contextlib.contextmanager
def script(place: Path, argument: str) -> Iterator[subprocess.Popen[str]]:
    path = place / "script.py"
    path.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(path), argument],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_script_without_main_guard_runs_once(place: Path) -> None:
    with script(place, "end") as process:
        output, _ = process.communicate(timeout=PATIENCE)
    lines = output.splitlines()
    assert [line for line in lines if line == "running"] == ["running"]
    assert lines[1].endswith(" True")
    assert process.returncode == 0
    assert left(place) == []


@pytest.mark.fault("the run is killed (−9)", "ranks, workers and the fork server end, their files go")
def test_ranks_and_their_files_vanish_with_a_killed_parent(place: Path) -> None:
    with script(place, "wait") as process:
        assert process.stdout is not None
        process.stdout.readline()
        ranks = [int(pid) for pid in process.stdout.readline().split()[:2]]
        assert all(alive(pid) for pid in ranks)
        assert left(place)
        started = descendants(process.pid)
        assert started > set(ranks)  # the fork server, and what tracks resources
        process.send_signal(signal.SIGKILL)
        process.wait(PATIENCE)
        wait_until(lambda: not any(alive(pid) for pid in started))
    wait_until(lambda: left(place) == [])


def test_ranks_ignore_an_interrupt(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    ranks = own_pool.pids
    for pid in ranks:
        os.kill(pid, signal.SIGINT)
    assert own_pool.run(summing()).finished
    assert own_pool.pids == ranks


@pytest.mark.fault("Ctrl-C while ranks work", "they do not see it; what was found is kept")
def test_an_interrupted_wait_leaves_a_pool_that_works(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    with stopped(own_pool.pids[0]):
        timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            own_pool.run(summing())
        timer.join()
    assert own_pool.run(summing()).finished


# ------------------------------------------------------------------------------------------------------- where ranks run


def test_ranks_share_one_core_and_wake_up_politely(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    cores = [os.sched_getaffinity(pid) for pid in own_pool.pids]
    assert cores[0] == cores[1]
    assert len(cores[0]) == 1
    assert [os.sched_getscheduler(pid) for pid in own_pool.pids] == [os.SCHED_BATCH] * 2


def test_ranks_listen_on_the_loopback_interface_alone(own_pool: ProcessGroupPool) -> None:
    own_pool.run(summing())
    sockets = {
        os.readlink(link) for pid in own_pool.pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()
    }
    listening = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{own_pool.pids[0]}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                listening.append(fields[1].partition(":")[0])
    assert listening
    assert set(listening) <= {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
