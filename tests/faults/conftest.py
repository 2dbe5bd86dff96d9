"""Fixtures for faults."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory for the temporary files of a run. `tmp_path` is too long for it: sockets would not have their names there."""
    path = Path(tempfile.mkdtemp(prefix="faults-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)
