"""The table of faults is as the tests of faults say."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def test_the_table_of_the_page_is_up_to_date(generate: ModuleType) -> None:
    text = generate.RELIABILITY.read_text(encoding="utf-8")
    assert generate.reliability(text) == text, "python docs/generate.py writes it anew"


def test_a_row_comes_from_the_mark_of_a_test(generate: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "test_one.py").write_text(
        "import pytest\n"
        "@pytest.mark.slow\n@pytest.mark.fault('rain', 'it ' 'stops')\ndef test_rain(): ...\n"
        "@pytest.mark.slow\ndef test_sun(): ...\n"
    )
    assert generate.faults(tmp_path) == [generate.Fault("rain", "it stops", "test_one.py::test_rain", True)]


def test_every_fault_has_one_row(generate: ModuleType) -> None:
    found = [fault.what for fault in generate.faults()]
    assert len(found) == len(set(found)) >= 20
