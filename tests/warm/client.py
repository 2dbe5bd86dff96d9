"""Asks the server for a process. As a script it stands for that process: it imports little, since shells start it often."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Mapping, Sequence


def ask(
    address: str, arguments: Sequence[str], cwd: str, env: Mapping[str, str], files: tuple[int, int, int]
) -> socket.socket:
    """Have `python ARGUMENTS` run; return the connection on which its pid and its return code come.

    Args:
        files: its standard input, output and error.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(address)
    request = os.memfd_create("request")  # it may be longer than a packet
    with open(request, "wb") as body:
        body.write(json.dumps({"arguments": [*arguments], "cwd": cwd, "env": dict(env)}).encode())
        body.flush()
        socket.send_fds(connection, [b"request"], [request, *files])
    return connection


def receive(connection: socket.socket, name: str) -> int:
    """Wait for a number that the server tells. The connection's time-out applies."""
    said = connection.recv(4096)
    assert said, "the server of commands has ended"
    number: int = json.loads(said)[name]
    return number


def main(address: str, *arguments: str) -> int:
    connection = ask(address, arguments, os.getcwd(), os.environ, (0, 1, 2))
    receive(connection, "pid")
    code = receive(connection, "code")
    return 128 - code if code < 0 else code  # as shells count


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
