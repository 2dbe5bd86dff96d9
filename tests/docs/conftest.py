"""What the tests of the documentation share."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

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
    spec = importlib.util.spec_from_file_location(f"tcverify_docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
