"""The program in flight, on disk: whatever happens to a run, the program that did it can be found afterwards."""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from io import FileIO
from pathlib import Path

from tcverify.application import Subject
from tcverify.cases.counterexample import (
    Counterexample,
    case_id,
    collect_versions,
    decode_counterexample,
    encode_counterexample,
)
from tcverify.errors import ProgramError, TcverifyError, UsageError
from tcverify.program import Contract, Finding, Program, dumps
from tcverify.program.codec import load_json
from tcverify.system.files import is_alive, remove_unfinished, write_atomically, writer

KIND = "run-died"

_PREFIX = "in-flight-"
_FINDING = Finding(KIND, "campaign", "the run ended while verifying this program")


#: Bytes that the file may hold before it is begun anew. Renaming a file onto another one makes some file systems write it to
#: the disk at once (14 ms where others write too), which costs more than most programs take.
MOST_BYTES = 4 << 20


class InFlight:
    """One file that holds the program being verified, as a counterexample of kind "run-died" without an id of its own.

    It is the last whole line. Earlier ones hold programs that have been verified.

    Args:
        state_dir: where the file stands, under a name with this machine's name and this process's id; made when missing.

    Raises:
        UsageError: it cannot be written there.
    """

    def __init__(self, state_dir: Path, subject: Subject, contract: Contract) -> None:
        self.path = state_dir / f"{_PREFIX}{writer()}.json"
        self._subject = subject
        self._contract = contract
        self._heads: dict[bool, str] = {}
        self._file: FileIO | None = None
        self._bytes = 0
        try:
            state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{state_dir} cannot be created: {error.strerror}", "run in a writable directory"
            ) from None

    def note(self, program: Program, deep: bool) -> None:
        """Write the program down, whole or not at all. Not synced: the death of the machine is not what this is for."""
        if deep not in self._heads:
            case = Counterexample(
                "0" * 8,
                program,
                None,
                "",
                self._subject.facts,
                _FINDING,
                contract=self._contract,
                size_drawn=program.size,
                deep=deep,
                pass_timeout=self._subject.timeout,
                environment=collect_versions(),
            )
            head = {key: value for key, value in encode_counterexample(case).items() if key != "program"}
            self._heads[deep] = json.dumps(head)[:-1]
        line = f'{self._heads[deep]}, "program": {dumps(program)}}}\n'.encode()
        try:
            if self._file is None or self._bytes > MOST_BYTES:
                self._begin(line)
            else:
                self._write(self._file, line)
        except OSError as error:
            self.close()  # what stands there may end in half a line: the next program begins a new file
            raise UsageError(f"{self.path} cannot be written: {error.strerror}", "is the disk full?") from None

    def _begin(self, line: bytes) -> None:
        """Put a file with this line alone in the place of what is there."""
        self.close()
        scratch = self.path.with_suffix(".new")
        self._file, self._bytes = scratch.open("wb", buffering=0), 0
        self._write(self._file, line)
        os.replace(scratch, self.path)

    def _write(self, file: FileIO, line: bytes) -> None:
        self._bytes += len(line)
        while line:  # a disk that is nearly full takes a part of it
            line = line[file.write(line) :]

    def close(self) -> None:
        """Leave the file as it is: the program in it has not been judged."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def clear(self) -> None:
        """Remove the file: the program has been judged."""
        self.close()
        for path in (self.path, self.path.with_suffix(".new")):  # the latter where the disk was full
            path.unlink(missing_ok=True)


def recover_in_flight(state_dir: Path, report_dir: Path) -> list[Path]:
    """Keep the programs that were in flight when earlier runs died: move them to `report_dir/crashed-<id>.json`.

    Files of runs that are still alive stay where they are, and so do those of other machines that share the directory: whether
    these runs are alive is for them to see. What dead runs left unfinished of counterexamples is removed.

    Returns:
        The new files. `tcverify show` and `tcverify replay` take them.
    """
    with contextlib.suppress(OSError):
        for scratch in state_dir.glob(f"{_PREFIX}*.new"):
            if not _alive(scratch):
                scratch.unlink(missing_ok=True)
        for directory in (report_dir, *report_dir.iterdir()):
            remove_unfinished(directory)
    return [keep_crashed(path, report_dir) for path in sorted(state_dir.glob(f"{_PREFIX}*.json")) if not _alive(path)]


def keep_crashed(path: Path, report_dir: Path) -> Path:
    """Move one file of `InFlight` to `report_dir/crashed-<id>.json` and return where it is now.

    A file that cannot be read (a foreign hand) is kept as it is, under its own name.
    """
    try:
        case = read_in_flight(path)
    except TcverifyError:
        kept = report_dir / f"crashed-{path.stem.removeprefix(_PREFIX)}.json"
        write_atomically(kept, path.read_text(errors="replace"))
    else:
        case = replace(case, id=case_id(case.program, case.facts, KIND))
        kept = report_dir / f"crashed-{case.id}.json"
        write_atomically(kept, json.dumps(encode_counterexample(case)) + "\n")
    path.unlink(missing_ok=True)
    return kept


def read_in_flight(path: Path) -> Counterexample:
    """Read the program that was in flight from a file of `InFlight`.

    Raises:
        ProgramError: there is none in it, or it is damaged.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ProgramError(f"{path} cannot be read: {error.strerror or error}") from None
    whole = [line for line in lines if line.endswith(b"\n")]  # the last one is not where the run died while it wrote
    return decode_counterexample(load_json(whole[-1] if whole else b"", str(path)), str(path))


def _alive(path: Path) -> bool:
    """Whether the process that wrote a file may live. This process has not written any when it looks."""
    name = path.stem.removeprefix(_PREFIX)
    return name != writer() and is_alive(name)


__all__ = ["InFlight", "keep_crashed", "read_in_flight", "recover_in_flight"]
