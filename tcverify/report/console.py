"""Lines on the terminal. Uses rich on a terminal, plain text elsewhere."""

from __future__ import annotations

import os
import sys
from typing import Any

from rich.console import Console
from rich.text import Text

from tcverify.errors import UsageError
from tcverify.report.sanitize import wrap


class _Console(Console):
    """A console that raises if the output of a run is closed, so that callers can handle it; rich's own would exit.

    Raises:
        BrokenPipeError: the reader has closed the output.
        UsageError: it cannot be written.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True
        raise BrokenPipeError

    def print(self, *args: Any, **options: Any) -> None:
        """See `rich.console.Console.print`."""
        try:
            super().print(*args, **options)
        except BrokenPipeError:
            raise
        except OSError as error:
            self.quiet = True
            raise UsageError(f"the output cannot be written: {error.strerror or error}", "is the disk full?") from None


def make_console() -> Console:
    """Return the console for standard output: as wide as the terminal or COLUMNS say; otherwise lines are not wrapped."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # an ASCII terminal shows less, but must not end the run
    free = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return _Console(highlight=False, markup=False, emoji=False, width=1_000_000 if free else None)


def say(console: Console, text: str = "", style: str = "") -> None:
    """Print one line, wrapped at blanks if the console is narrower."""
    for part in wrap(text, console.width):
        console.print(Text(part, style=style), soft_wrap=True)


__all__ = ["make_console", "say"]
