"""The command `tcverify`, and `python -m tcverify`."""

from __future__ import annotations

import contextlib
import gc
import sys

from tcverify.errors import UsageError
from tcverify.processes import start_server

#: Commands that apply passes or start ranks, which takes processes.
_START_PROCESSES = ("run", "check", "replay")


def main() -> None:
    """Run the command line. Ctrl-C while it is imported, which takes seconds, ends it as Ctrl-C later does."""
    gc.disable()  # what is imported stays: to look through it again and again takes a seventh of the time
    try:
        if sys.argv[1:2] and sys.argv[1] in _START_PROCESSES and not {"-h", "--help"} & {*sys.argv}:
            with contextlib.suppress(UsageError):  # the command tells, if it comes to start a process
                start_server()  # it imports what this process imports: one beside the other
        from tcverify.cli import main as command
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    gc.freeze()
    gc.enable()
    command()


if __name__ == "__main__":
    main()
