"""Every reader of files that others may have written, and what is to hold of it whatever they hold."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tcverify.cases.baseline import read_baseline
from tcverify.cases.counterexample import decode_counterexample, encode_counterexample
from tcverify.errors import ProgramError, TcverifyError, UsageError
from tcverify.program import dumps, loads
from tcverify.program.codec import load_json
from tcverify.report.html import to_html
from tcverify.report.markdown import to_markdown
from tcverify.report.script import to_script
from tcverify.report.text import to_text

ROOT = Path(__file__).parents[2]
WHERE = "given.json"

#: Categories of characters that terminals act upon: control, format, surrogate, line and paragraph separators.
ACTIVE = ("Cc", "Cf", "Cs", "Zl", "Zp")


def _refused(error: TcverifyError, where: str) -> bool:
    assert where in error.message, error.message
    return False


def program(text: bytes) -> bool:
    """A program is read exactly, or refused with an error that says where. Returns whether it was read."""
    try:
        found = loads(text, WHERE)
    except ProgramError as error:
        return _refused(error, WHERE)
    written = dumps(found)
    assert dumps(loads(written)) == written
    return True


def counterexample(text: bytes) -> bool:
    """A counterexample is read exactly and can be shown in every form, or is refused."""
    try:
        found = decode_counterexample(load_json(text, WHERE), WHERE)
    except ProgramError as error:
        return _refused(error, WHERE)
    data = encode_counterexample(found)
    again = decode_counterexample(json.loads(json.dumps(data, allow_nan=False)), WHERE)
    assert encode_counterexample(again) == data
    path = Path("reports") / found.id / "counterexample.json"
    shown = to_text(found, path)
    assert not {c for c in shown if unicodedata.category(c) in ACTIVE} - {"\n"}
    to_markdown(found, path)
    to_html(found, path)
    compile(to_script(found), "repro.py", "exec")
    return True


def baseline(text: bytes, path: Path) -> bool:
    """A baseline is read, or refused with an error that names the file."""
    path.write_bytes(text)
    try:
        read_baseline(path)
    except UsageError as error:
        return _refused(error, str(path))
    return True


def seeds(name: str) -> list[Any]:
    """Real files to begin with, as data."""
    cases = [json.loads(path.read_bytes()) for path in sorted(ROOT.glob("reports/gallery/*/counterexample.json"))]
    if name == "counterexample":
        return cases
    if name == "program":
        return [case[part] for case in cases for part in ("program", "rewritten") if case[part] is not None]
    known = {
        "pass": "mine:Pass",
        "kind": "wrong-value",
        "fingerprint": "neg",
        "title": "t",
        "case": "3f9c2a1b",
        "reason": "",
    }
    return [{"format": "tcverify-baseline", "version": 1, "known": [known, {**known, "kind": "race"}]}]


def readers(scratch: Path) -> dict[str, Callable[[bytes], bool]]:
    """The readers by the kind of file; `scratch` is a file for those that read files only."""
    return {"program": program, "counterexample": counterexample, "baseline": lambda text: baseline(text, scratch)}
