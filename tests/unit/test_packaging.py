"""What pyproject.toml says of the project is true of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no tomllib")
def test_every_package_is_shipped() -> None:
    import tomllib

    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    there = {".".join(file.parent.relative_to(ROOT).parts) for file in (ROOT / "tcverify").rglob("__init__.py")}
    assert sorted(there | {"tcverify.strategies"}) == sorted(listed)
