"""Processes come from a fork server: one for each PYTHONHASHSEED, which a process that is forked cannot change."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tcverify.system import end_process, start_process, start_server


def hashes(connection: Connection) -> None:
    """Tell what the hash of a string is, and who has forked this process."""
    connection.send_bytes(f"{hash('tcverify')} {os.getppid()}".encode())
    connection.recv_bytes()


@contextlib.contextmanager
def started(target: Callable[[Connection], None], **how: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    process, connection = start_process(target, **how)
    try:
        yield process, connection
    finally:
        end_process(process)
        connection.close()


def ask(hash_seed: int | None) -> tuple[int, int]:
    with started(hashes, hash_seed=hash_seed) as (_, connection):
        said, server = map(int, connection.recv_bytes().decode().split())
    return said, server


def test_strings_are_hashed_in_another_order_where_that_is_asked_for() -> None:
    usual, server = ask(None)
    other, other_server = ask(7)
    assert (usual != other, server != other_server) == (True, True)
    assert ask(7) == (other, other_server)
    assert ask(None) == (usual, server)


@pytest.mark.parametrize("hash_seed", [None, 7])
def test_a_server_that_has_died_is_started_again(hash_seed: int | None) -> None:
    said, server = ask(hash_seed)
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    again, new = ask(hash_seed)
    assert new != server
    assert hash_seed is None or again == said


def test_what_is_started_ahead_is_what_forks() -> None:
    start_server(8)
    start_server(8)
    assert ask(8)[1] == ask(8)[1]


def test_a_forked_copy_of_this_process_has_servers_of_its_own() -> None:
    """Test runners fork, for one. What forks for their parent is no child of theirs, and not theirs to ask."""
    script = """
import os
from tests.system.test_processes import ask

said, server = ask(None)
copy = os.fork()
if not copy:
    again, other = ask(None)
    os._exit(server == other)
_, status = os.waitpid(copy, 0)
assert status == 0, status
assert ask(None)[1] == server
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def nested(connection: Connection) -> None:
    """Tell what children of this process say; and start one that is stuck in a call, which holds the interpreter lock."""
    said = [ask(seed) for seed in (None, 7)]
    process, child = start_process(stuck)
    child.recv_bytes()
    connection.send_bytes(f"{said}; {process.pid}".encode())
    connection.recv_bytes()


def stuck(connection: Connection) -> None:
    connection.send_bytes(b"now")
    ctypes.PyDLL(None).sleep(600)


def test_children_of_children_come_from_the_same_servers_and_end_with_their_parent() -> None:
    said = [ask(seed) for seed in (None, 7)]
    with started(nested, alone=False) as (process, connection):
        servers, pid = connection.recv_bytes().decode().split("; ")
        assert servers == str(said)
        assert Path(f"/proc/{pid}").exists()
        os.kill(process.pid or 0, signal.SIGKILL)
        deadline = time.monotonic() + 20
        while Path(f"/proc/{pid}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert ask(None) == said[0]  # the server goes on


def asking(connection: Connection) -> None:
    """Tell what a child says, again and again."""
    while connection.recv_bytes():
        connection.send_bytes(str(ask(7)).encode())


def test_a_shared_server_that_has_died_is_replaced() -> None:
    said, server = ask(7)
    with started(asking, alone=False) as (_, connection):
        connection.send_bytes(b"say")
        assert connection.recv_bytes().decode() == str((said, server))
        os.kill(server, signal.SIGKILL)
        os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
        connection.send_bytes(b"say")
        again, new = map(int, connection.recv_bytes().decode().strip("()").split(", "))
    assert (again == said, new != server) == (True, True)


def variable(connection: Connection) -> None:
    connection.send_bytes(os.environ.get("TCVERIFY_TEST", "none").encode())


def test_processes_have_the_environment_of_the_one_that_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> str:
        with started(variable, hash_seed=9) as (_, connection):
            return connection.recv_bytes().decode()

    monkeypatch.setenv("TCVERIFY_TEST", "one")
    start_server(9)
    assert told() == "one"
    monkeypatch.setenv("TCVERIFY_TEST", "two")
    assert told() == "two"
    monkeypatch.delenv("TCVERIFY_TEST")
    assert told() == "none"


def test_the_server_that_multiprocessing_knows_is_the_users() -> None:
    ask(None)
    look = "import os, sys; os._exit('torch' in sys.modules)"
    process = multiprocessing.get_context("forkserver").Process(target=exec, args=(look,))
    process.start()
    process.join()
    assert process.exitcode == 0
