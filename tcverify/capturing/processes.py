"""Captures the graphs of all ranks, each in a separate process that acts as that rank.

The process has a fake process group, whose collectives do nothing: models are parallelised and captured as on a cluster,
without one. All side effects of the user's code end with the process.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import fx

from tcverify.capturing.compile_artifacts import place_of, read_artifact, texts_in
from tcverify.capturing.exported import capture_exported
from tcverify.capturing.normalize import plain
from tcverify.capturing.record import Captured
from tcverify.capturing.transport import decode_captured, encode_captured
from tcverify.errors import PassLoadError, ProgramError, TcverifyError, UnsupportedOp
from tcverify.program import NotSerialisable, Program, dumps, loads
from tcverify.registry.extensions import extensions_here, load_extensions_of
from tcverify.registry.references import find
from tcverify.system import LAZY_MODULES, end_process, log_to, scratch, start_process

#: Seconds that capturing may take.
DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True, slots=True)
class CaptureSource:
    """Where a graph comes from.

    Attributes:
        text: the path of a `.pt2` file; that of a file of torch.compile's, with the number of a graph in it; or
            "module:function" ("path/file.py:function").
        rank, world_size: what the process believes to be; a world size of None makes no process group.
    """

    text: str
    rank: int = 0
    world_size: int | None = None


def capture_all(sources: Sequence[CaptureSource], timeout: float = DEFAULT_TIMEOUT) -> list[Program | list[Captured]]:
    """Capture from every source, several at a time; for each a program, or the graphs that it gives (one, or one per rank).

    Raises:
        ProgramError: a source gives none; the message says which, on which rank, and why.
    """
    found: list[Program | list[Captured]] = []
    together = max(2, os.cpu_count() or 1)
    for start in range(0, len(sources), together):
        running = [(source, *_start(source)) for source in sources[start : start + together]]
        try:
            for source, process, connection, log in running:
                found.append(_answer(source, process, connection, log, timeout))
        finally:
            for _, process, connection, log in running:
                end_process(process)
                connection.close()
                log.close()
    return found


def _start(source: CaptureSource) -> tuple[Any, Connection, BinaryIO]:
    log, path = scratch.new_log("capture")
    job = {
        **asdict(source),
        "extensions": extensions_here(),
        "path": [str(Path.cwd()), *sys.path],
        "directory": str(Path.cwd()),
        "log": path,
    }
    process, connection = start_process(_serve, (json.dumps(job),))
    return process, connection, log


def _answer(
    source: CaptureSource, process: Any, connection: Connection, log: BinaryIO, timeout: float
) -> Program | list[Captured]:
    where = source.text if source.world_size is None else f"{source.text} on rank {source.rank}"
    try:
        if not connection.poll(timeout):
            raise ProgramError(f"{where} did not return within {timeout:g} s", "raise the limit with --capture-timeout")
        reply = json.loads(connection.recv_bytes())
    except (EOFError, OSError):
        process.join(5)
        tail = "\n".join(log.read().decode(errors="replace").splitlines()[-12:])
        raise ProgramError(f"{where} crashed its process (exit code {process.exitcode})", tail or None) from None
    if "error" in reply:
        message, hint = reply["error"]
        raise ProgramError(f"{where}: {message}", hint)
    if "program" in reply:
        return loads(reply["program"], where)
    try:
        return [decode_captured(one, where) for one in reply["captured"]]
    except UnsupportedOp as error:  # what that process has imported gave it a meaning
        raise ProgramError(f"{where}: {error.message}", _EXTEND) from None


_EXTEND = (
    "name the module that defines the op with --extension: all processes need it; other functions are traced through"
)


# --------------------------------------------------------------------------------------------------- in the other process


def _serve(connection: Connection, job_text: str) -> None:
    job = json.loads(job_text)
    log_to(job["log"])
    torch.set_num_threads(1)
    sys.path[:] = job["path"]
    os.chdir(job["directory"])
    for module in LAZY_MODULES:
        importlib.import_module(module)
    try:
        load_extensions_of(job["extensions"])
        reply = _captured(CaptureSource(job["text"], job["rank"], job["world_size"]))
    except NotSerialisable as error:
        reply = {"error": [error.message, _EXTEND]}
    except TcverifyError as error:
        reply = {"error": [error.message, error.hint]}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code may raise anything
        frame = traceback.extract_tb(error.__traceback__)[-1:]
        at = "".join(f" ({f.filename}:{f.lineno})" for f in frame)
        text = str(error).strip().splitlines() or [""]
        reply = {"error": [f"it raises {type(error).__name__}: {text[0]}{at}", None]}
    connection.send_bytes(json.dumps(reply).encode())


def _captured(source: CaptureSource) -> dict[str, Any]:
    if (place := place_of(source.text)) is not None:
        path, number = place
        return {"captured": [encode_captured(read_artifact(texts_in(path)[number or 0]))]}
    made = _exported(source.text) if source.text.endswith(".pt2") else _called(source)
    if isinstance(made, Program):
        return {"program": dumps(made)}
    several = isinstance(made, list)
    return {"captured": [encode_captured(as_captured(one)) for one in (made if several else [made])]}


def _exported(path: str) -> Any:
    try:
        return torch.export.load(path)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        raise ProgramError(
            f"torch.export cannot load it: {type(error).__name__}: {text[0]}",
            "write it with torch.export.save, by this torch",
        ) from error


def _called(source: CaptureSource) -> Any:
    try:
        function, _ = find(source.text, "program")
    except PassLoadError as error:
        raise ProgramError(error.message, error.hint) from None
    if not callable(function):
        return function  # a graph module or a program itself
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    if isinstance(function, torch.nn.Module):
        return function
    given = {"rank": source.rank, "world_size": source.world_size}
    wanted = {name: value for name, value in given.items() if name in parameters}
    needed = [
        p.name
        for p in parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    ]
    strange = [name for name in needed if name not in given]
    if strange:
        raise ProgramError(
            f"the function requires '{strange[0]}'", "it is called without arguments, or with rank and world_size"
        )
    if source.world_size is None:
        return function(**wanted)
    return _as_rank(source.rank, source.world_size, lambda: function(**wanted))


def _as_rank(rank: int, world_size: int, call: Callable[[], Any]) -> Any:
    """Call a function as a rank of a job: by a fake process group, unless it makes one itself."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0"
    )
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        return call()
    except ValueError as error:
        if "initialize the default process group twice" not in str(error):
            raise
        raise ProgramError(
            "the function initialises torch.distributed itself, but a fake process group already exists",
            "leave that to tcverify, or do it only if not torch.distributed.is_initialized()",
        ) from None


def as_captured(made: Any) -> Captured:
    """Take what a function may give for one rank: what `capture` returns, an exported program, or a graph module, alone or with
    example inputs.

    Raises:
        ProgramError: it is something else.
    """
    if isinstance(made, Captured):
        return made
    if isinstance(made, torch.export.ExportedProgram):
        return capture_exported(made)
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], fx.GraphModule):
        return plain(made[0], list(made[1]))
    if isinstance(made, fx.GraphModule):
        return plain(made)
    raise ProgramError(
        f"it returns a {type(made).__name__}",
        "return a GraphModule, (GraphModule, example inputs), an ExportedProgram, the result of tcverify.capture; a list with "
        "one per rank; or a Program",
    )


__all__ = ["DEFAULT_TIMEOUT", "CaptureSource", "as_captured", "capture_all"]
