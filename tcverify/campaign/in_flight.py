"""The program in flight, on disk: whatever happens to a run, the program that did it can be found afterwards."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

from tcverify.application import Pair, PassFacts
from tcverify.counterexample import (
    Counterexample,
    case_id,
    encode_counterexample,
    make_counterexample,
    read_counterexample,
    write_atomically,
)
from tcverify.errors import TcverifyError
from tcverify.program import Contract, Finding, Program, dumps
from tcverify.verifier import Verdict

KIND = "run-died"

_NAME = "in-flight-"


class InFlight:
    """One file that holds the program being verified, as a counterexample of kind "run-died".

    Args:
        state_dir: where the file stands, under a name with this process's id; made when missing.
    """

    def __init__(self, state_dir: Path, facts: PassFacts, contract: Contract) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        self.path = state_dir / f"{_NAME}{os.getpid()}.json"
        self._facts = facts
        self._contract = contract
        self._around: dict[bool, tuple[str, str]] = {}

    def note(self, program: Program, deep: bool) -> None:
        """Write the program down. Not synced to the disk: the death of the machine is not what this is for."""
        if deep not in self._around:
            case = _record(program, self._facts, self._contract, deep)
            before, _, after = json.dumps(encode_counterexample(replace(case, id="0" * 8))).partition(dumps(program, spaced=True))
            self._around[deep] = before, after
        before, after = self._around[deep]
        scratch = self.path.with_suffix(".new")
        scratch.write_text(f"{before}{dumps(program)}{after}\n")
        os.replace(scratch, self.path)
