"""Messages between a `Guarded` and its workers: a line of JSON, followed by programs as text, each once and on one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from tcverify.application.coverage.recorder import CodePoint
from tcverify.application.edit_log import EditPlace
from tcverify.application.pair import Defect, Foreign, Pair, PassFailure, PassTrace, Stage
from tcverify.errors import InternalError, ProgramError, UnsupportedOp
from tcverify.execution.records import decode_comparison, encode_comparison
from tcverify.program import Program, decode_rewrite_requests, decode_statistics, dumps
from tcverify.program.codec import decode


def message_of(said: Any, programs: Sequence[str] = ()) -> bytes:
    """Write a message: one line of JSON, followed by one line for each program. This JSON contains no newlines."""
    return "\n".join([json.dumps(said), *programs]).encode()


def parts_of(message: bytes) -> tuple[Any, list[bytes]]:
    """The contents of a message, and the programs that come with it, unparsed. Raises ValueError for a malformed message."""
    said, *programs = message.split(b"\n")
    return json.loads(said), programs


class _Programs:
    """The texts of the programs of a message, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, program: Program | None) -> int | None:
        """The number of a program's text among `texts`."""
        return None if program is None else self._numbers.setdefault(dumps(program), len(self._numbers))

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)


def encode_pair(pair: Pair, grown: int) -> bytes:
    """Write the message of a worker that has applied its pass.

    Args:
        grown: bytes by which the worker has grown since it began to wait for programs.
    """
    programs = _Programs()
    said = {
        "grown": grown,
        "untouched": pair.rewritten is pair.original,
        "rewritten": programs.number(pair.rewritten) if _travels(pair) else None,
        "again": programs.number(pair.again) if pair.foreign is None else None,
        "changed": pair.changed,
        "rewrites": pair.rewrites,
        "failure": asdict(pair.failure) if pair.failure is not None else None,
        "defects": [asdict(d) for d in pair.defects],
        "declined": pair.declined,
        "foreign": _encode_foreign(pair.foreign) if pair.foreign is not None else None,
        "listing": pair.listing,
        "seconds": pair.seconds,
        "stages": _encode_stages(pair, programs),
        "statistics": [row.as_dict() for row in pair.statistics],
        "asked": pair.trace.rewrites,
        "reached": pair.trace.reached,
        "edited": [{name: list(places) for name, places in rank.items()} for rank in pair.trace.edited],
        "looked": [[*where, list(names)] for where, names in pair.trace.looked.items()],
    }
    return message_of(said, programs.texts)


def _encode_foreign(foreign: Foreign) -> list[Any]:
    return [foreign.why, encode_comparison(foreign.judged) if foreign.judged is not None else None]


def _decode_foreign(why: str, judged: Any) -> Foreign:
    return Foreign(why, decode_comparison(judged) if judged is not None else None)


def _encode_stages(pair: Pair, programs: _Programs) -> list[list[Any]]:
    """Name and program of every stage, by number; None if there is none, -1 if it equals that of the previous stage."""
    rows: list[list[Any]] = []
    before: Program | None = pair.original
    for stage in pair.stages:
        same = stage.program is not None and stage.program is before
        rows.append([stage.name, -1 if same else programs.number(stage.program)])
        before = stage.program
    return rows


def _decode_stages(program: Program, rows: list[list[Any]], texts: list[bytes]) -> list[Stage]:
    stages: list[Stage] = []
    before: Program | None = program
    for name, number in rows:
        if number is None or number >= 0:
            before = _program_at(texts, number, f"what {name} left")
        stages.append(Stage(name, before))
    return stages


def _program_at(texts: list[bytes], number: int | None, where: str) -> Program | None:
    return None if number is None else decode(json.loads(texts[number]), where)


def _travels(pair: Pair) -> bool:
    """Whether the rewritten program has to be sent: not if it cannot be, or if the receiver has it already."""
    return pair.foreign is None and pair.rewritten is not pair.original


def decode_pair(program: Program, data: Any, texts: list[bytes]) -> Pair:
    """The result in a worker's message, about a program that the receiver has: only changes are sent.

    Args:
        program: the one to which the pass was applied.
        data: the parsed first line of the message.
        texts: programs of the message, by number.

    Raises:
        InternalError: no worker writes such a message.
    """
    if "unread" in data:
        return Pair(program, foreign=Foreign(data["unread"]))
    try:
        rewritten = _program_at(texts, data["rewritten"], "the rewritten program")
        return Pair(
            program,
            rewritten=program if data["untouched"] else rewritten,
            again=_program_at(texts, data["again"], "the program after a second application"),
            changed=data["changed"],
            rewrites=data["rewrites"],
            failure=PassFailure(**data["failure"]) if data["failure"] is not None else None,
            defects=[Defect(**d) for d in data["defects"]],
            declined=data["declined"],
            foreign=_decode_foreign(*data["foreign"]) if data["foreign"] is not None else None,
            listing=data["listing"],
            seconds=data["seconds"],
            stages=_decode_stages(program, data["stages"], texts),
            statistics=decode_statistics(data["statistics"]),
            trace=PassTrace(
                decode_rewrite_requests(data["asked"]),
                [CodePoint(*row) for row in data["reached"]],
                {(file, line): tuple(names) for file, line, names in data["looked"]},
                [
                    {name: tuple(EditPlace(*place) for place in places) for name, places in rank.items()}
                    for rank in data["edited"]
                ],
            ),
        )
    except ProgramError as error:  # the result of the pass can be serialized, but is not a program
        if isinstance(error.__cause__, UnsupportedOp):
            why = f"{error.__cause__.message}, but in the pass's process: name the module that registers it with --extension"
            return Pair(program, foreign=Foreign(why), listing=data["listing"])
        return Pair(program, defects=[Defect("lint", 0, error.message)], listing=data["listing"])
    except (KeyError, TypeError, IndexError) as error:
        raise InternalError(f"the worker's reply cannot be read: {error!r}") from error
