"""Every folder of the library is a package, and so is shipped: setuptools looks for `__init__.py`."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_folder_is_a_package() -> None:
    folders = {file.parent for file in (ROOT / "tcverify").rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").is_file()]


def test_the_library_needs_no_link() -> None:
    assert not [path for path in (ROOT / "tcverify").rglob("*") if path.is_symlink()]
