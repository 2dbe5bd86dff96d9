"""The temporary files of a run go with it, or with the next one, and never while they are in use."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tcverify.errors import UsageError
from tcverify.system import end_process, scratch, start_process
from tests.faults.processes import ROOT, alive, descendants, left, wait_until

HOLDER = (
    "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX); print(); sys.stdin.read()"
)


@contextlib.contextmanager
def held(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a directory."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, place: Path) -> Iterator[Path]:
    """As in a process that has no directory yet, with `place` for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.delenv(scratch.LASTING, raising=False)
    scratch._of.cache_clear()
    yield place
    scratch._of.cache_clear()


@pytest.mark.fault(
    "the run is killed (−9) together with its fork server, as when a machine or a container ends",
    "the next run of the same user removes its temporary files, and touches none that are in use",
)
def test_what_a_killed_process_has_left_goes_with_the_next_run(fresh: Path) -> None:
    theirs = fresh / f"{scratch.PREFIX}abcdefgh"
    (theirs / "group-1").mkdir(parents=True)
    (theirs / "pass-1.log").write_text("said")
    with held(theirs) as process:
        scratch.remove_left(str(fresh))
        assert (theirs / "pass-1.log").read_text() == "said"
        process.kill()
        process.wait()
    mine = Path(scratch.directory())
    assert [*fresh.iterdir()] == [mine]
    scratch.remove_left(str(fresh))
    assert mine.is_dir()  # ours is in use, too


def test_an_owner_that_is_about_to_end_is_waited_for(fresh: Path) -> None:
    theirs = fresh / f"{scratch.PREFIX}abcdefgh"
    theirs.mkdir()
    with held(theirs) as process:
        timer = threading.Timer(0.2, process.kill)
        timer.start()
        scratch.remove_unused(str(theirs), 60.0)
        timer.join()
    assert not theirs.exists()


def test_what_only_looks_like_a_directory_of_a_run_is_left_alone(fresh: Path) -> None:
    elsewhere = fresh / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").touch()
    link = fresh / f"{scratch.PREFIX}link"
    link.symlink_to(elsewhere)
    file = fresh / f"{scratch.PREFIX}file"
    file.touch()
    scratch.remove_left(str(fresh))
    assert (elsewhere / "file").exists()
    assert link.is_symlink()
    assert file.exists()


@pytest.mark.parametrize("lost", ["held", "removed"])
def test_a_directory_that_is_taken_away_before_it_is_held_is_made_again(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    make, taken = tempfile.mkdtemp, list[str]()

    def mkdtemp(prefix: str, dir: str) -> str:
        path = make(prefix=prefix, dir=dir)
        if not taken:
            taken.append(path)
            if lost == "removed":
                os.rmdir(path)
            else:
                fcntl.flock(os.open(path, os.O_RDONLY), fcntl.LOCK_EX)
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    assert scratch.directory() not in taken
    assert os.path.isdir(scratch.directory())


def test_where_files_cannot_be_locked_nobody_removes_them(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    mine = scratch.directory()
    scratch.remove_left(str(fresh))
    assert os.path.isdir(mine)


def test_a_directory_that_somebody_has_removed_is_made_again(fresh: Path) -> None:
    first = scratch.directory()
    os.rmdir(first)
    assert scratch.directory() != first
    assert os.path.isdir(scratch.directory())


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_has_a_directory_of_its_own(fresh: Path) -> None:
    mine = scratch.directory()
    if (child := os.fork()) == 0:
        try:
            (fresh / "theirs").write_text(scratch.directory())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = (fresh / "theirs").read_text()
    assert theirs.startswith(str(fresh))
    assert theirs != mine
    assert os.path.isdir(mine)


def test_without_room_for_temporary_files_the_error_says_so(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def mkdtemp(**_: str) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    with pytest.raises(UsageError, match=r"temporary files cannot be created: .*No space left on device") as caught:
        scratch.directory()
    assert "TMPDIR" in (caught.value.hint or "")


def test_a_long_place_for_temporary_files_is_as_good(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of sockets are 107 bytes at most."""
    long = fresh / ("long" * 20)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setenv(scratch.LASTING, str(fresh))
    assert Path(scratch.directory()).parent == fresh
    scratch._of.cache_clear()
    monkeypatch.delenv(scratch.LASTING)
    assert Path(scratch.directory()).parent == Path("/tmp")


def writes(connection: Connection) -> None:
    """Leave a temporary file."""
    descriptor, path = tempfile.mkstemp()
    os.close(descriptor)
    connection.send_bytes(path.encode())
    connection.recv_bytes()


@pytest.mark.parametrize("hash_seed", [None, pytest.param(1, marks=pytest.mark.slow)])
def test_temporary_files_of_a_process_go_when_it_is_ended(hash_seed: int | None) -> None:
    process, connection = start_process(writes, hash_seed=hash_seed)
    path = Path(connection.recv_bytes().decode())
    assert path.is_file()
    assert path.parent == Path(scratch.child_directory(scratch.directory(), process.pid or 0))
    end_process(process)
    connection.close()
    assert not path.parent.exists()


OWNER = """
import sys
from tcverify.system import end_process, start_process
from tests.faults.test_scratch import owns
process, connection = start_process(owns, alone=False)
print(connection.recv_bytes().decode(), flush=True)
if sys.stdin.read(1) == "e":
    end_process(process)
    print("ended", flush=True)
sys.stdin.read()
"""


def owns(connection: Connection) -> None:
    """Have a directory, as a worker of `--workers` has."""
    connection.send_bytes(scratch.directory().encode())
    connection.recv_bytes()


@pytest.mark.parametrize("killed", [False, True])
def test_the_directory_of_a_worker_goes_too_where_paths_are_long(place: Path, killed: bool) -> None:
    long = place / ("long" * 9)
    long.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(long)}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().strip())
        assert theirs.is_dir()
        assert theirs.parent == long  # beside that of the run: in it, names of sockets would be too long
        if killed:
            process.kill()
        else:
            process.stdin.write("e")
            process.stdin.flush()
            assert process.stdout.readline() == "ended\n"
            assert not theirs.exists()
            process.stdin.close()
            process.wait()
    wait_until(lambda: left(long) == [])


KILLED = """
import sys
from tcverify import ProcessGroupPool
from tcverify.application import Guarded
from tests.faults.test_pool_faults import summing
print("imported", flush=True)
guarded = Guarded("tcverify.passes.identity:Identity")
guarded._second()  # of another PYTHONHASHSEED
pool = ProcessGroupPool(2)
pool.run(summing())
print("running", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize("all_at_once", [False, True])
@pytest.mark.parametrize("moment", ["the fork server starts", "the pass's process starts", "a rank starts", "it runs"])
def test_a_run_that_is_killed_leaves_nothing(place: Path, moment: str, all_at_once: bool) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    command = [sys.executable, "-c", KILLED]

    def reached() -> bool:
        if len(descendants(process.pid)) < 2:  # the fork server, and what tracks resources
            return False
        match moment:
            case "the fork server starts":
                return True
            case "the pass's process starts":
                return bool(list(place.glob("tcverify.*/pass-*.log")))
            case "a rank starts":
                return bool(list(place.glob("tcverify.*/group-*")))
            case _:
                return process.stdout is not None and process.stdout.readline() == "running\n"

    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        wait_until(reached, 200)
        started = descendants(process.pid)
        process.kill()
        for pid in started if all_at_once else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)
    wait_until(
        lambda: not any(alive(pid) for pid in started), 200
    )  # a fork server notices it when it has imported torch
    if all_at_once:
        scratch.remove_left(str(place))
    assert left(place) == []
