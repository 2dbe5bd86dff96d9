"""Applies a pass in a worker process, so that a pass that hangs or crashes becomes a finding and the campaign continues."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from tcverify.application.apply import apply_counted, apply_pass, tell_apart
from tcverify.application.coverage.recorder import CodePoint
from tcverify.application.coverage.vocabulary import Vocabulary
from tcverify.application.coverage.watched import Watch, WatchedPass
from tcverify.application.loading import LoadedPass, importable_target, load_pass, pipeline, prepare_pass
from tcverify.application.messages import decode_pair, encode_pair, message_of, parts_of
from tcverify.application.pair import Defect, Pair, PassFacts, PassFailure
from tcverify.errors import InternalError, PassLoadError, ProgramError, TcverifyError
from tcverify.program import Allowed, Contract, Program, decode_rewrite_requests, dumps
from tcverify.program.codec import decode
from tcverify.registry.extensions import extensions_here, load_extensions_of
from tcverify.registry.passes import reference_of, stage_names
from tcverify.registry.pipelines import SEPARATOR
from tcverify.system import (
    LAZY_MODULES,
    end_process,
    limit_blocking,
    limit_memory,
    log_to,
    machine_memory,
    resident_bytes,
    scratch,
    start_process,
    start_server,
)

#: Time limit for a worker to report where its pass hangs. A worker that blocks signals never does.
STACK_SECONDS = 2.0

#: PYTHONHASHSEED of the second worker: results that differ there depend on the order in which strings are hashed.
_OTHER_HASH_SEED = 1

#: Share of the time limit: an application that takes less may be repeated, traced, within that limit.
_BRIEF = 0.1

#: Time limit for importing a pass, in seconds. Importing torch and its dependencies on a busy machine is slow.
LOAD_TIMEOUT = 120.0

#: Default time limit for one application of a pass, in seconds.
DEFAULT_TIMEOUT = 20.0

#: Bytes of memory by which the process of a pass may grow; beyond that, its allocations fail. At most half of the
#: machine's memory.
MEMORY_LIMIT = min(16 << 30, machine_memory() // 2)

#: Bytes by which it may have grown after it has answered; beyond that it is replaced, since leaks of passes add up over a night.
GROWTH_LIMIT = 1 << 30

#: Seconds to wait for an unwanted answer before the process is replaced.
UNWANTED_TIMEOUT = 2.0

#: Seconds that sending a message may take. A stopped worker reads nothing, and may leave half an answer.
MESSAGE_TIMEOUT = 20.0


class Subject(Protocol):
    """A pass under verification, in whichever process it runs."""

    facts: PassFacts
    contract: Contract
    timeout: float  # time limit for one application, in seconds; enforced only if the pass has a process of its own

    def apply(self, program: Program, *, deep: bool = False) -> Pair:
        """Apply the pass to every rank's graph; see `apply_pass`."""
        ...

    def start(self, program: Program, *, deep: bool = False, watch: Watch | None = None) -> Callable[[], Pair]:
        """Start to apply the pass; call the result to wait for the end. A pass in this process is applied immediately.

        One program at a time: starting another one, or applying the pass, abandons an application that was not waited for.

        Args:
            watch: what to record; used only if coverage is recorded at all.
        """
        ...

    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the pass; empty if coverage is not recorded."""
        ...

    def apply_counted(self, program: Program, allowed: Allowed) -> Pair:
        """Apply the pass and count its rewrites; it may make only those that are `allowed`; see `PassTrace.rewrites`."""
        ...

    def close(self) -> None:
        """Release processes."""
        ...


class InProcess:
    """A pass that cannot be imported by name (a closure, an instance): applied here, without protection from crashes."""

    timeout = DEFAULT_TIMEOUT

    def __init__(self, loaded: LoadedPass) -> None:
        self._loaded = loaded
        self._watched: WatchedPass | None = None
        self.facts = loaded.facts
        self.contract = loaded.contract

    def apply(self, program: Program, *, deep: bool = False) -> Pair:
        return apply_pass(self._loaded, program, deep=deep)

    def start(self, program: Program, *, deep: bool = False, watch: Watch | None = None) -> Callable[[], Pair]:
        if watch is None:
            return lambda: self.apply(program, deep=deep)
        return lambda: self._watching().apply(program, deep=deep, watch=watch)

    def vocabulary(self) -> Vocabulary:
        return self._watching().vocabulary

    def _watching(self) -> WatchedPass:
        if self._watched is None:
            self._watched = WatchedPass(self._loaded)
        return self._watched

    def apply_counted(self, program: Program, allowed: Allowed) -> Pair:
        return apply_counted(self._loaded, program, allowed)

    def close(self) -> None:
        """Nothing to release."""


class AppliedPass:
    """A pass that has run already, in any process: returns the recorded result.

    Args:
        pair: the program that it was applied to, and the result.
    """

    timeout = DEFAULT_TIMEOUT

    def __init__(self, facts: PassFacts, contract: Contract, pair: Pair) -> None:
        self.facts = facts
        self.contract = contract
        self._pair = pair

    def apply(self, program: Program, *, deep: bool = False) -> Pair:
        if program is not self._pair.original:
            raise InternalError("a pass that has run already is asked to run on another program")
        return self._pair

    def start(self, program: Program, *, deep: bool = False, watch: Watch | None = None) -> Callable[[], Pair]:
        return lambda: self.apply(program, deep=deep)

    def vocabulary(self) -> Vocabulary:
        return Vocabulary()

    def apply_counted(self, program: Program, allowed: Allowed) -> Pair:
        """It does not run again, so nothing is counted."""
        return self.apply(program)

    def close(self) -> None:
        """Nothing to release."""


class Guarded:
    """A pass in a separate worker process, which starts immediately, and is restarted whenever it ends.

    Args:
        target: "module:attribute" or "path/file.py:attribute".
        options: keyword options of the pass.
        timeout: time limit for one application (all ranks), in seconds.
        covered: record the coverage of the pass's code (see `Pair.reached`): of the files that define it, or of the modules
            named here. None records nothing.

    Attributes:
        files: those that define the pass, if coverage is recorded.

    Raises:
        PassLoadError: the pass cannot be loaded.
    """

    def __init__(
        self,
        target: str,
        options: Mapping[str, Any] | None = None,
        *,
        timeout: float = DEFAULT_TIMEOUT,
        covered: Sequence[str] | None = None,
    ) -> None:
        self.target = target
        self.covered = covered
        self.options = dict(options or {})
        self.timeout = timeout
        self._worker: _Worker | None = None
        self._other_hash: _Worker | None = None
        self.facts = self._main().facts
        self.files = self._main().files
        self.contract = Contract.of(self.facts.contract)

    def apply(self, program: Program, *, deep: bool = False) -> Pair:
        """Apply the pass in the worker. A deep application also runs in a second worker that hashes strings differently."""
        return self.start(program, deep=deep)()

    def start(self, program: Program, *, deep: bool = False, watch: Watch | None = None) -> Callable[[], Pair]:
        """See `Subject.start`. Raises `NotSerialisable` for a program that cannot be sent."""
        text = dumps(program)
        worker = self._main()
        worker.ask(text, deep, watch=watch)
        if not deep:
            return lambda: worker.answer(program, self.timeout)
        other = self._second()
        other.ask(text, False)

        def both() -> Pair:
            pair = worker.answer(program, 4 * self.timeout)
            again = other.answer(program, self.timeout)
            judged = pair.rewritten is not None and not pair.defects and pair.foreign is None
            if judged and not _agree(pair, again):
                pair.defects += self._why_they_disagree(text, pair, again)
            return pair

        return both

    def _why_they_disagree(self, text: str, pair: Pair, again: Pair) -> list[Defect]:
        """What makes the workers disagree about a program: the order of hashes, or what each was applied to before, which new
        processes know nothing of."""
        program, pairs = pair.original, []
        for hash_seed in (None, _OTHER_HASH_SEED):
            worker = _Worker(self.target, self.options, self.timeout, hash_seed=hash_seed)
            try:
                worker.ask(text, hash_seed is None)
                pairs.append(worker.answer(program, 4 * self.timeout))
            finally:
                worker.close()
        new, other = pairs
        repeated = [defect for defect in new.defects if defect.aspect == "unrepeatable"]
        if repeated:
            return repeated
        if _agree(new, other):
            message = "its result depends on the programs that it was applied to before"
            return [Defect("unrepeatable", 0, message + _where(pair, again))]
        if other.failure is not None:
            return [Defect("hash-order", 0, f"with another PYTHONHASHSEED it {other.failure.message}")]
        message = "its result depends on the order in which Python hashes strings (PYTHONHASHSEED)"
        return [Defect("hash-order", 0, message + _where(new, other))]

    def vocabulary(self) -> Vocabulary:
        """See `Subject.vocabulary`."""
        return self._main().vocabulary() if self.covered is not None else Vocabulary()

    def forget(self) -> None:
        """Reset coverage, as if the pass had never been applied. No application may be in flight."""
        if self._worker is not None and self._worker.free():
            self._worker.forget()

    def apply_counted(self, program: Program, allowed: Allowed) -> Pair:
        """See `Subject.apply_counted`. Raises `NotSerialisable` for a program that cannot be sent."""
        worker = self._main()
        worker.ask(dumps(program), False, {"allowed": allowed if allowed is None else [sorted(row) for row in allowed]})
        return worker.answer(program, self.timeout)

    def _main(self) -> _Worker:
        if self._worker is None or not self._worker.free():
            self._worker = _Worker(self.target, self.options, self.timeout, covered=self.covered)
        return self._worker

    def _second(self) -> _Worker:
        if self._other_hash is None or not self._other_hash.free():
            self._other_hash = _Worker(self.target, self.options, self.timeout, hash_seed=_OTHER_HASH_SEED)
        return self._other_hash

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [w.pid for w in (self._worker, self._other_hash) if w is not None and w.alive]

    @property
    def printed(self) -> str:
        """The last lines that the pass has printed, 20 at most; empty once its process has ended."""
        return self._worker.tail() if self._worker is not None and self._worker.alive else ""

    def close(self) -> None:
        """End the worker processes."""
        for worker in (self._worker, self._other_hash):
            if worker is not None:
                worker.close()
        self._worker = self._other_hash = None

    def __enter__(self) -> Guarded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_ahead() -> None:
    """Let the second workers of deep applications start faster: the process that they are forked from imports for 3 s first."""
    start_server(_OTHER_HASH_SEED)


def subject_of(pass_: Any) -> Subject:
    """Prepare a pass, given as a name, a reference, a class, a function or an instance, for verification.

    References, and classes and functions that can be imported by name, run in a guarded worker process; everything else
    runs in this process. A list of passes is a pipeline.

    Raises:
        PassLoadError, UsageError: it cannot be loaded, is not a pass, or this torch does not have it.
    """
    if isinstance(pass_, (AppliedPass, Guarded, InProcess)):
        return pass_
    given = pass_ if isinstance(pass_, (list, tuple)) else [pass_]
    named = (map(reference_of, stage_names(stage)) if isinstance(stage, str) else [stage] for stage in given)
    stages = list(itertools.chain.from_iterable(named))
    targets = [stage if isinstance(stage, str) else importable_target(stage) for stage in stages]
    if stages and all(target is not None for target in targets):
        return Guarded(SEPARATOR.join(str(target) for target in targets))
    if len(stages) != 1:
        if not stages:
            raise PassLoadError("a pipeline needs stages", "give [first, second]")
        return InProcess(
            pipeline([load_pass(s) if isinstance(s, str) else prepare_pass(s, "", {}) for s in stages], {})
        )
    return InProcess(prepare_pass(stages[0], "", {}))


def _where(pair: Pair, other: Pair) -> str:
    """Where what two workers have made of a program differs first; or how the other one failed."""
    if pair.rewritten is None or other.rewritten is None:
        return f": behind others it {other.failure.message}" if other.failure is not None else ""
    one, two = pair.rewritten, other.rewritten
    told = (tell_apart(one.graph(rank), two.graph(rank)) for rank in range(pair.original.world_size))
    return next(filter(None, told), "")


def _agree(pair: Pair, other: Pair) -> bool:
    """Whether two workers have made the same of a program."""
    if pair.rewritten is None or other.rewritten is None:
        return pair.rewritten is other.rewritten
    return dumps(other.rewritten) == dumps(pair.rewritten)


# -------------------------------------------------------------------------------------------------- the parent's side


class _Worker:
    """One worker process and the pipe to it."""

    def __init__(
        self,
        target: str,
        options: Mapping[str, Any],
        timeout: float,
        hash_seed: int | None = None,
        covered: Sequence[str] | None = None,
    ) -> None:
        self._log, path = scratch.new_log("pass")
        self._log_path = Path(path)
        job: dict[str, Any] = {
            "target": target,
            "options": dict(options),
            "path": [str(Path.cwd()), *sys.path],
            "log": path,
        }
        job["directory"] = str(Path.cwd())
        job["extensions"] = extensions_here()
        job["covered"] = None if covered is None else list(covered)
        job["memory"] = MEMORY_LIMIT
        job["brief"] = timeout * _BRIEF
        self._process, self._connection = start_process(_serve, (json.dumps(job),), hash_seed=hash_seed)
        limit_blocking(self._connection, MESSAGE_TIMEOUT)
        self.alive = True
        self._asked = self._dropped = False
        self._answers = 0
        self._failure: PassFailure | None = None  # if the question did not arrive
        reply = self._receive(LOAD_TIMEOUT)
        if isinstance(reply, PassFailure):
            self.close()
            raise PassLoadError(f"importing '{target}' {reply.message}", reply.detail or None)
        said, _ = reply
        if "load_error" in said:
            self.close()
            raise PassLoadError(*said["load_error"])
        self.facts = PassFacts(**said["facts"])
        self.files: tuple[str, ...] = tuple(said["files"])

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def free(self) -> bool:
        """Whether it can receive a question. An unread answer is dropped; if it does not come soon, the process is killed."""
        if self._asked and self.alive and not self._drop():
            self.close()
        return self.alive

    def _drop(self) -> bool:
        """Read the answer to the last question, and let the worker forget it."""
        try:
            if self._failure is not None or not self._connection.poll(UNWANTED_TIMEOUT):
                return False
            said, _ = parts_of(self._connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            return False
        self._asked, self._dropped = False, True
        return bool(said["grown"] <= GROWTH_LIMIT)

    def ask(self, text: str, deep: bool, count: Mapping[str, Any] | None = None, watch: Watch | None = None) -> None:
        """Send a program; `count` holds the allowed rewrites, if rewrites are to be counted."""
        self._asked = True
        said = {
            "deep": deep,
            "count": count,
            "dropped": self._dropped,
            "watch": None if watch is None else [sorted(watch.points), watch.look, watch.edits, watch.judge],
        }
        self._dropped = False
        try:
            self._connection.send_bytes(message_of(said, [text]))
        except OSError as error:
            self._failure = self._explain(error)
        except BaseException:
            self.close()
            raise

    def answer(self, program: Program, timeout: float) -> Pair:
        """Wait for the answer to the last question."""
        reply = self._failure or self._receive(timeout)
        self._asked = False
        if isinstance(reply, PassFailure):
            self.close()
            return Pair(program, failure=reply)
        self._answers += 1
        said, texts = reply
        pair = decode_pair(program, said, texts)
        if said["grown"] > GROWTH_LIMIT:
            self.close()
            grown, programs = (
                f"{said['grown'] / (1 << 30):.1f} GiB",
                f"{self._answers} program{'s'[: self._answers > 1]}",
            )
            pair.outgrown = f"the pass's process had grown by {grown} after {programs} and was replaced by a new one"
        return pair

    def forget(self) -> None:
        with contextlib.suppress(OSError):  # the next question will show that it has died
            self._connection.send_bytes(message_of({"forget": True}))

    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the pass; empty if its process fails to return it."""
        self._connection.send_bytes(message_of({"vocabulary": True}))
        reply = self._receive(LOAD_TIMEOUT)
        if isinstance(reply, PassFailure):
            self.close()
            return Vocabulary()
        said, _ = reply
        conditions = {(file, line): tuple(names) for file, line, names in said.pop("conditions")}
        return Vocabulary(**{kind: tuple(names) for kind, names in said.items()}, conditions=conditions)

    def _receive(self, timeout: float) -> tuple[Any, list[bytes]] | PassFailure:
        """Wait for a message and the texts that come with it; if a worker dies or is late, return a `PassFailure`."""
        try:
            # Children of the pass hold the pipe open, too: the pipe alone does not show that the process has died.
            ready = wait([self._connection, self._process.sentinel], timeout)
            if not ready:
                return PassFailure("pass-timeout", f"did not return within {timeout:g} s", None, self._stack())
            if not self._connection.poll(0):
                raise EOFError
            return parts_of(self._connection.recv_bytes())
        except (EOFError, OSError, ValueError) as error:  # ValueError: the pass has written into the pipe
            return self._explain(error)
        except BaseException:
            self.close()  # interrupted between question and answer: the answer must not be mistaken for that of another question
            raise

    def _explain(self, error: Exception) -> PassFailure:
        """What an error of the communication says about the pass."""
        if isinstance(error, BlockingIOError):  # it stopped in the middle of a message
            return PassFailure("pass-timeout", "stopped in the middle of its reply", None, self._stack())
        self._process.join(5)
        return PassFailure("pass-died", f"crashed its process ({self._exit()})", None, self.tail())

    def _exit(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            with contextlib.suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _stack(self) -> str:
        """The position of the pass, most recent call first: the worker dumps its stack on a signal."""
        start = self._log.seek(0, os.SEEK_END)
        if self._process.pid is not None:
            with contextlib.suppress(OSError):
                os.kill(self._process.pid, signal.SIGUSR1)
        dump, deadline = "", time.monotonic() + STACK_SECONDS
        while True:
            time.sleep(0.1)
            self._log.seek(start)
            before, dump = dump, self._log.read().decode(errors="replace")
            if (dump and dump == before) or time.monotonic() > deadline:
                break
        _, found, frames = dump.rpartition("(most recent call first):\n")
        ours = str(Path(__file__).parent) + os.sep  # the callers of the pass are irrelevant
        of_pass = list(itertools.takewhile(lambda frame: ours not in frame, frames.splitlines()))
        return "most recent call first:\n" + "\n".join(of_pass[:12]) if found else dump

    def tail(self) -> str:
        """The last lines that the worker wrote to its standard output and error."""
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 4000))
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-20:])

    def close(self) -> None:
        """Kill the process and wait for its end."""
        self.alive = False
        end_process(self._process)
        self._connection.close()
        self._log.close()
        self._log_path.unlink(missing_ok=True)


# -------------------------------------------------------------------------------------------------- the worker's side


def _serve(connection: Connection, job_text: str) -> None:
    """Main function of the worker process: load the pass, then apply it to every program that arrives."""
    job = json.loads(job_text)
    log_to(job["log"])
    faulthandler.register(signal.SIGUSR1, file=2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # tensors are small: more threads would only wait for each other
    for module in LAZY_MODULES:
        importlib.import_module(module)
    sys.path[:] = job["path"]
    os.chdir(job["directory"])  # the fork server is still in the directory of its parent
    try:
        load_extensions_of(job["extensions"])
        loaded = load_pass(job["target"], job["options"])
    except TcverifyError as error:
        connection.send_bytes(message_of({"load_error": [error.message, error.hint]}))
        return
    gc.freeze()  # garbage collections need not scan torch's objects again and again
    worker = os.getpid()
    limit_memory(job["memory"])
    resident = resident_bytes()
    watched = WatchedPass(loaded, job["covered"], job["brief"]) if job["covered"] is not None else None
    files = watched.files if watched is not None else []
    connection.send_bytes(message_of({"facts": asdict(loaded.facts), "files": files}))
    while True:
        try:
            request, texts = parts_of(connection.recv_bytes())
        except EOFError:
            return
        if "forget" in request:
            if watched is not None:
                watched.forget(everything=True)
            continue
        if "vocabulary" in request:
            names = watched.vocabulary if watched is not None else Vocabulary()
            conditions = [[*where, list(named)] for where, named in names.conditions.items()]
            connection.send_bytes(message_of({**asdict(replace(names, conditions={})), "conditions": conditions}))
            continue
        try:
            program = decode(json.loads(texts[0]))
        except ProgramError as error:  # what the pass imports has defined an op with another signature
            connection.send_bytes(message_of({"unread": error.message, "grown": 0}))
            continue
        if request["dropped"] and watched is not None:
            watched.forget()
        if request["count"] is None and watched is not None:
            pair = watched.apply(program, deep=request["deep"], watch=_watch_of(request["watch"]))
        elif request["count"] is None:
            pair = apply_pass(loaded, program, deep=request["deep"])
        else:
            rows = request["count"]["allowed"]
            pair = apply_counted(
                loaded, program, None if rows is None else list(map(frozenset, decode_rewrite_requests(rows)))
            )
        if os.getpid() != worker:
            os._exit(0)  # the pass has forked: a second answer would be mistaken for that to the next question
        connection.send_bytes(encode_pair(pair, resident_bytes() - resident))


def _watch_of(said: Any) -> Watch | None:
    return None if said is None else Watch(frozenset(CodePoint(*row) for row in said[0]), *said[1:])
