"""Files are there whole or not at all, also where their writer is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tcverify.campaign import Corpus, recover_in_flight
from tcverify.errors import UsageError
from tcverify.system.files import remove_unfinished, write_atomically, writer

#: Dies where a file is written and not yet in its place.
DIES = """
import os, pathlib, signal, sys
from tcverify.system.files import write_atomically
os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
write_atomically(pathlib.Path(sys.argv[1]), "text")
"""


def test_a_file_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")

    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(UsageError, match="No space left on device"):
        write_atomically(path, "after")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "before"


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="file/x cannot be written") as caught:
        write_atomically(tmp_path / "file" / "x", "")
    assert caught.value.hint == "choose another path with --report-dir"


def left_behind(path: Path) -> Path:
    """Kill a process where it writes a file and return what it left."""
    ended = subprocess.run([sys.executable, "-c", DIES, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = path.parent.glob(".*")
    assert left.read_text() == "text"
    return left


def test_what_a_dead_writer_left_is_removed(tmp_path: Path) -> None:
    left = left_behind(tmp_path / "file")
    remove_unfinished(tmp_path)
    assert not left.exists()


def test_what_others_may_still_write_is_left_alone(tmp_path: Path) -> None:
    for name in (writer(), f"{writer().rpartition('-')[0]}-{os.getppid()}", "x-1"):
        (tmp_path / f".file.abc.{name}.new").write_text("")
    (tmp_path / ".hidden").write_text("")
    remove_unfinished(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    remove_unfinished(tmp_path / "nowhere")


def test_a_run_removes_what_a_dead_one_left_of_a_counterexample(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    places = [left_behind(reports / "0123abcd" / "counterexample.json"), left_behind(reports / "crashed-0123abcd.json")]
    assert recover_in_flight(tmp_path / "state", reports) == []
    assert not any(place.exists() for place in places)


def test_a_corpus_forgets_what_a_dead_run_left(tmp_path: Path) -> None:
    left = left_behind(tmp_path / f"{'0' * 32}.json")
    warnings: list[str] = []
    Corpus(tmp_path, warnings.append)
    assert (warnings, left.exists()) == ([], False)
