"""Processes come from a fork server: one for each PYTHONHASHSEED, which a process that is forked cannot change."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tcverify.system import end_process, start_process, start_server


def hashes(connection: Connection) -> None:
    """Tell what the hash of a string is, and who has forked this process."""
    connection.send_bytes(f"{hash('tcverify')} {os.getppid()}".encode())
    connection.recv_bytes()


def ask(hash_seed: int | None) -> tuple[int, int]:
    process, connection = start_process(hashes, hash_seed=hash_seed)
    try:
        said, server = map(int, connection.recv_bytes().decode().split())
    finally:
        end_process(process)
        connection.close()
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


def test_the_server_that_multiprocessing_knows_is_the_users() -> None:
    ask(None)
    look = "import os, sys; os._exit('torch' in sys.modules)"
    process = multiprocessing.get_context("forkserver").Process(target=exec, args=(look,))
    process.start()
    process.join()
    assert process.exitcode == 0
