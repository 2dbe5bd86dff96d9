"""What the tests of the documentation share."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.support.scripts import load_script

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """The script that writes pages and tables."""
    return hook("generate")


@pytest.fixture(scope="module")
def exhibits() -> ModuleType:
    """The script that writes the gallery and the findings in PyTorch."""
    return hook("exhibits")


def hook(name: str) -> ModuleType:
    """Load a script of docs/ that mkdocs calls."""
    return load_script(ROOT / "docs" / f"{name}.py")
