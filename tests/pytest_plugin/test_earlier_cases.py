"""Which cases the workers of pytest-xdist have found since a run began, whatever the clock does meanwhile."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from _pytest.config import _prepareconfig

from tcverify import pytest_plugin
from tcverify.cases.counterexample import FILE_NAME
from tcverify.system.files import write_atomically


def write(place: Path, case: str, year: int, text: str = "{}") -> None:
    """A case, as written on a machine whose clock says so."""
    path = place / "reports" / case / FILE_NAME
    write_atomically(path, text)
    os.utime(path, ((year - 1970) * 31556952.0,) * 2)


@pytest.mark.parametrize("year", [1980, 2100])
def test_cases_are_told_from_earlier_ones_whatever_the_clock_says(tmp_path: Path, year: int) -> None:
    for case in ("earlier", "again"):
        write(tmp_path, case, 2020)
    config = _prepareconfig(["--rootdir", str(tmp_path), "-c", os.devnull])
    try:
        assert list(pytest_plugin._found_by_workers(config, set())) == []  # there are no workers
        for _ in range(2):  # of two workers
            pytest_plugin.pytest_configure_node(SimpleNamespace(config=config, workerinput={}))
        assert list(pytest_plugin._found_by_workers(config, set())) == []
        for case in ("again", "new", "told"):
            write(tmp_path, case, year)
        found = [line.split()[0] for line in pytest_plugin._found_by_workers(config, {"told"})]
    finally:
        config._ensure_unconfigure()
    assert found == ["again", "new"]
