"""What is kept of the earlier failures of a pass."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tcverify.campaign.earlier_failures import Failures
from tests.cases.test_counterexample import FACTS, some_case


def test_the_newest_come_first_and_the_oldest_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tcverify.campaign.earlier_failures.LIMIT", 2)
    failures = Failures(tmp_path, FACTS, "2 ranks")
    for day, case in enumerate(["0000000a", "0000000c", "0000000b"]):
        failures.add(some_case(id=case))
        for path in failures.directory.glob(f"{case}/*"):
            os.utime(path, (day, day))
    assert [case.id for case in failures] == ["0000000b", "0000000c"]
