"""What a run shows of how far it is."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tcverify.campaign import CampaignStarted, Progress, Statistics
from tcverify.report import terminal
from tcverify.report.terminal import TerminalReport
from tests.report.test_junit import STARTED, finished

LONG = replace(STARTED, max_examples=200)

COUNTS = Statistics(programs=50, changed=20, elapsed=5.0)
EVENT = Progress(COUNTS, "shrinking wrong-value", causes=2, behaviours=31)
LINE = "50 of 200 programs, 2 causes, 15 s left, shrinking wrong-value, 31 behaviours, changed 40 %, 10/s"


def shown(tmp_path: Path, *, width: int, is_terminal: bool, started: CampaignStarted, **options: object) -> str:
    out = StringIO()
    console = Console(file=out, width=width, force_terminal=is_terminal, highlight=False, **options)  # type: ignore[arg-type]
    report = TerminalReport(console, tmp_path)
    for event in (started, EVENT, finished()):
        report(event)
    return out.getvalue()


def test_a_terminal_shows_programs_causes_and_the_time_left(tmp_path: Path) -> None:
    text = shown(tmp_path, width=120, is_terminal=True, started=LONG)
    assert LINE in text
    assert text.rindex("\x1b[2K") > text.rindex(LINE)  # and takes it away in the end


def test_a_narrow_terminal_shows_the_beginning_on_one_line(tmp_path: Path) -> None:
    text = shown(tmp_path, width=40, is_terminal=True, started=LONG)
    assert f"{LINE[:37]}…" in text
    assert "31 behaviours" not in text


def test_without_colour_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    text = shown(tmp_path, width=120, is_terminal=True, started=LONG)
    assert LINE in text
    assert not any(f"\x1b[{code}m" in text for code in range(30, 38))


@pytest.mark.parametrize(("interval", "lines"), [(60.0, 0), (0.0, 1)])
def test_a_log_has_a_line_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: float, lines: int
) -> None:
    monkeypatch.setattr(terminal, "INTERVAL", interval)
    text = shown(tmp_path, width=120, is_terminal=False, started=LONG)
    assert text.count(f"\n  {LINE}\n") == lines
    assert "\x1b" not in text


def test_a_dumb_terminal_counts_as_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert LINE not in shown(tmp_path, width=120, is_terminal=True, started=LONG)
