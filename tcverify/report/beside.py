"""Files that are written next to a counterexample during a run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from tcverify.campaign import Event, FindingFound
from tcverify.cases.counterexample import Counterexample
from tcverify.report.sanitize import one_line
from tcverify.system.files import write_atomically


class FileReport(ABC):
    """Subscribes to campaigns and writes a file next to every counterexample.

    Args:
        tell: called with one line: where the file is, or why it cannot be written. The finding itself is already saved, so the
            run continues.
    """

    #: The file's name.
    name: ClassVar[str]
    #: The message for a file that was written, with {} for its path; "" for none.
    announcement: ClassVar[str] = ""

    def __init__(self, report_dir: Path, tell: Callable[[str], None]) -> None:
        self.report_dir = report_dir
        self.tell = tell

    @abstractmethod
    def content(self, case: Counterexample) -> str | None:
        """Return the contents of the file; None if there should be none."""

    def __call__(self, event: Event) -> None:
        if not isinstance(event, FindingFound):
            return
        path = self.report_dir / event.counterexample.id / self.name
        try:
            text = self.content(event.counterexample)
            if text is None:
                return
            write_atomically(path, text)
        except Exception as error:  # noqa: BLE001 - a file that cannot be made must not end the run that found something
            self.tell(f"{path} was not written: {one_line(error)}")
        else:
            if self.announcement and event.counterexample.finding.severity == "error":
                self.tell(self.announcement.format(path))


__all__ = ["FileReport"]
