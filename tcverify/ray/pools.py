"""Process groups as Ray actors: each outlives the slices that use it, and Ray restarts it if it dies."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from tcverify.domains import FLOAT64, Domain, domain_of
from tcverify.errors import ExecutorError, TcverifyError
from tcverify.execution import Comparison, Executor, Run, make_executor, start_executor
from tcverify.execution.process_group.messages import Reply, decode_reply, encode_reply
from tcverify.execution.records import decode_comparison, encode_comparison
from tcverify.program import NotSerialisable, Program, dumps, loads
from tcverify.registry.extensions import extensions_here, load_extensions_of
from tcverify.workers.slices import decode_error, encode_error

#: Time limit for an actor to answer, in seconds. A process group has its own shorter limits, whose errors name the rank.
LIMIT_SECONDS = 600.0


class RankPool:
    """The actor: an executor for programs of one number of ranks. Messages are JSON text, including errors.

    Args:
        name: of the executor; see `make_executor`.
        extensions: those of the process that uses it.
    """

    def __init__(self, name: str, world_size: int, extensions: Mapping[str, Any]) -> None:
        os.environ["TCVERIFY_WORKER"] = str(os.getpid())  # pools of one machine spread over its cores
        torch.set_num_threads(1)
        load_extensions_of(extensions)
        self._executor = make_executor(name, world_size)

    def start(self) -> str:
        """Start the ranks."""
        return _answer(lambda: start_executor(self._executor))

    def compare(self, original: str, rewritten: str, domain: str) -> str:
        """Compare two programs; see `encode_comparison`."""
        pair = loads(original), loads(rewritten)
        return _answer(lambda: encode_comparison(self._executor.compare(*pair, domain_of(domain))))

    def run(self, program: str, observe: bool, domain: str) -> tuple[str, list[list[bytes]]]:
        """Run a program; results have the form of replies of ranks (see `encode_reply`)."""
        replies: list[list[bytes]] = []

        def ran() -> str:
            done = self._executor.run(loads(program), observe=observe, domain=domain_of(domain))
            replies.extend(encode_reply(Reply(0, [result]), values=True) for result in done.ranks)
            return done.executor

        return _answer(ran), replies


class RemotePool:
    """An executor whose ranks belong to an actor, which runs on the machine of this process as long as it has capacity."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name = name
        self.world_size = world_size
        near = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        actor = ray.remote(RankPool).options(num_cpus=0, max_restarts=-1, scheduling_strategy=near)
        self._actor = actor.remote(name, world_size, extensions_here())

    def start(self) -> None:
        """Start the ranks now. Raises ExecutorError."""
        self._result(self._actor.start.remote())

    def close(self) -> None:
        """End the actor together with its ranks."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor)

    def run(self, program: Program, *, observe: bool = False, domain: Domain = FLOAT64) -> Run:
        """See `Executor.run`."""
        text, replies = self._got(self._actor.run.remote(_text(program), observe, domain.name))
        name = _read(text)
        ranks = []
        for rank, (head, blob) in enumerate(replies):
            ranks += decode_reply(rank, json.loads(head), blob).results
        return Run(name, ranks, domain=domain.name)

    def compare(self, original: Program, rewritten: Program, domain: Domain = FLOAT64) -> Comparison:
        """See `Executor.compare`."""
        return self.start_comparison(original, rewritten, domain)()

    def start_comparison(
        self, original: Program, rewritten: Program, domain: Domain = FLOAT64
    ) -> Callable[[], Comparison]:
        """See `Executor.start_comparison`."""
        asked = self._actor.compare.remote(_text(original), _text(rewritten), domain.name)
        return lambda: decode_comparison(self._result(asked))

    def _result(self, asked: Any) -> Any:
        return _read(self._got(asked))

    def _got(self, asked: Any) -> Any:
        try:
            return ray.get(asked, timeout=LIMIT_SECONDS)
        except GetTimeoutError:
            raise ExecutorError(
                f"{self.name}: the actor of the process group said nothing for {LIMIT_SECONDS:g} s"
            ) from None
        except RayError as error:
            what = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ExecutorError(f"{self.name}: the actor of the process group died: {what}") from None


@contextlib.contextmanager
def ray_executors(name: str) -> Iterator[Callable[[int], Executor | None]]:
    """Like `tcverify.execution.named_executors`, for process groups that are actors."""
    made: dict[int, RemotePool] = {}

    def executor(world_size: int) -> Executor | None:
        if name == "none":
            return None
        if world_size not in made:
            made[world_size] = RemotePool(name, world_size)
        return made[world_size]

    try:
        yield executor
    finally:
        for one in made.values():
            one.close()


def _answer(work: Callable[[], Any]) -> str:
    """The result of a function, or the error that it raises: Ray would need to pickle that."""
    try:
        return json.dumps({"result": work()})
    except TcverifyError as error:
        return json.dumps({"error": encode_error(error)})


def _read(text: str) -> Any:
    data = json.loads(text)
    if "error" in data:
        name, message, hint = data["error"]
        raise decode_error(str(name), str(message), hint)
    return data["result"]


def _text(program: Program) -> str:
    try:
        return dumps(program)
    except NotSerialisable as error:
        raise ExecutorError(f"the program cannot be sent to the processes of a group: {error.message}") from None


__all__ = ["LIMIT_SECONDS", "RankPool", "RemotePool", "ray_executors"]
