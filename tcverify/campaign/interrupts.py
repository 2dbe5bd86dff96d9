"""Ctrl-C, at places where it can be handled."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any


class Interrupts:
    """Keeps Ctrl-C from getting lost, and from surfacing where nobody expects it.

    A KeyboardInterrupt that Python raises in the callback of a weak reference is printed and forgotten; one that it raises in
    the middle of Hypothesis makes an error of another kind. So within `with` a SIGINT is noted; it is raised by `check`, and at
    once within `open`. The second one is raised wherever it comes, until `hold`. In other threads than the main
    one, and where somebody handles SIGINT already, nothing changes.
    """

    def __init__(self) -> None:
        self._seen = False
        self._open = False
        self._held = False
        self._before: Any = None

    def __enter__(self) -> Interrupts:
        in_main = threading.current_thread() is threading.main_thread()
        if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again, self._seen = self._seen, True
        if (self._open or again) and not self._held:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """Raise nothing any more: the run ends already, and what it has found is being written."""
        self._held = True

    def check(self) -> None:
        """Raise KeyboardInterrupt if one has been noted."""
        if self._seen:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Let a SIGINT interrupt at once what is done inside: our own work, which may take long."""
        self._open = True
        try:
            self.check()
            yield
        finally:
            self._open = False


__all__ = ["Interrupts"]
