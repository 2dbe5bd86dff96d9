"""`make quick` takes what has changed, and begins no test when its time is over."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import UNTIL
from tests.quick import changed

ROOT = Path(__file__).parents[2]


def test_what_differs_from_a_revision_has_changed(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=one", "-c", "user.email=one@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    for name in ("kept.py", "edited.py", "removed.py"):
        (tmp_path / name).write_text("")
    (tmp_path / ".gitignore").write_text("ignored.py\n")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "edited.py").write_text("1\n")
    (tmp_path / "removed.py").unlink()
    (tmp_path / "new file.py").write_text("")
    (tmp_path / "ignored.py").write_text("")
    expected = {"edited.py", "removed.py", "new file.py"}
    assert {path.name for path in changed("HEAD", tmp_path)} == expected
    git("add", ".")
    git("commit", "-m", "second")
    assert changed("HEAD", tmp_path) == []
    assert {path.name for path in changed("HEAD~1", tmp_path)} == expected
    with pytest.raises(SystemExit, match="nowhere"):
        changed("nowhere", tmp_path)


def test_no_test_begins_when_the_time_is_over() -> None:
    command = ("-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "tests/program/test_mesh.py")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "TCVERIFY"))}
    code, out, _ = warm.run(*command, cwd=ROOT, env={**kept, "PYTHONPATH": str(ROOT), UNTIL: "0"})
    assert code == 0, out
    assert "the time is over; `make test` runs it" in out
    assert " passed" not in out
