"""Executes code of ranks, compiled or not, on any device, and lets lockstep carry out its collectives.

Each rank runs in a thread of its own, under a mode that sees the collectives it calls. What they mean and whom they meet is
decided as for graphs: a deadlock is found at once, and collectives read and write at the moment that is asked for. One thread
runs at a time, so that runs are deterministic and share one stream of the device.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tcverify.domains import NATIVE
from tcverify.errors import TcverifyError
from tcverify.execution import NodeError, RankResult, Run
from tcverify.execution.asynchrony import Moment, Outstanding
from tcverify.execution.interpreter import Event, collective_events
from tcverify.execution.lockstep.lockstep import drive_ranks
from tcverify.execution.plan import first_line
from tcverify.ops import Group, lookup, with_group
from tcverify.program import Program

Tensor = torch.Tensor

#: Takes the inputs of a rank one by one, and returns what its graph returns.
Call = Callable[..., Any]


def run_calls(
    program: Program, calls: Sequence[Call], device: torch.device, timing: Moment = "issue", executor: str = "compiled"
) -> Run:
    """Run code that stands for the graphs of a program, in the program's own dtypes.

    Args:
        calls: of each rank.
        timing: when asynchronous collectives read and write.

    Returns:
        The run. A rank whose code raises has `error` set.

    Raises:
        TcverifyError: this project cannot run an op or a kernel.
    """
    run = Run(executor, [RankResult(rank) for rank in range(program.world_size)], domain=NATIVE.name)
    ranks = []
    for rank, call in enumerate(calls):
        names = [node.target for node in program.graphs[program.ranks[rank].graph].nodes if node.op == "placeholder"]
        specs = program.sources.chosen(names, rank)
        result = run.ranks[rank]
        result.inputs = [spec.values(program.mesh, rank, program.seed, NATIVE).to(device, copy=True) for spec in specs]
        result.input_names, result.mutates = [str(name) for name in names], True
        groups = {dim.name: Group(dim.name, dim.group(rank)) for dim in program.mesh.dims}
        ranks.append(_Rank(call, result, groups, Outstanding(timing, NATIVE)))
    generators = [one.events() for one in ranks]
    try:
        return drive_ranks(run, generators, NATIVE)
    finally:
        for generator in generators:
            generator.close()
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class _Abandoned(BaseException):
    """Ends the thread of a rank that is not driven any further. No handler of errors on the way is to see it."""


@dataclass(slots=True)
class _Rank:
    """A rank whose code runs in a thread, which stands still while anything else runs.

    Attributes:
        asked: what the thread asks for: (node, event), or None when it has ended.
        answers: to what was asked; an exception is raised there.
    """

    call: Call
    result: RankResult
    groups: Mapping[str, Group]
    outstanding: Outstanding
    asked: SimpleQueue[tuple[str, Event] | None] = field(default_factory=SimpleQueue)
    answers: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    failed: BaseException | None = None

    def events(self) -> Generator[tuple[str, Event], Any, RankResult]:
        """Run the code; yield what it asks for, as `run_rank` does."""
        thread = threading.Thread(target=self._run, name=f"rank {self.result.rank}", daemon=True)
        thread.start()
        try:
            while (event := self.asked.get()) is not None:
                self.answers.put((yield event))
        except GeneratorExit:
            self.answers.put(_Abandoned())
            raise
        finally:
            thread.join()
        if isinstance(self.failed, TcverifyError):
            raise self.failed
        return self.result

    def _run(self) -> None:
        try:
            with torch.no_grad(), _Collectives(self):
                outputs = pytree.tree_leaves(self.call(*self.result.inputs))
            self.result.outputs, self.result.structure = outputs, f"{len(outputs)} values"
        except _Abandoned:
            pass
        except Exception as error:  # noqa: BLE001 - any error of the code is an observation about it
            self.failed = error
            self.result.error = NodeError("the code", f"{type(error).__name__}: {first_line(error)}")
        finally:
            self.asked.put(None)

    def ask(self, event: tuple[str, Event]) -> Any:
        """Ask for something, in the thread; return the answer."""
        self.asked.put(event)
        answer = self.answers.get()
        if isinstance(answer, _Abandoned):
            raise answer
        return answer


class _Collectives(TorchDispatchMode):
    """Asks for the collectives that the code of a rank calls."""

    def __init__(self, rank: _Rank) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rank = rank
        self._numbers = itertools.count()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """See `Completion.ignore_compile_internals`."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = lookup(func)
        if not op.collective:
            return func(*args, **kwargs)
        rank = self._rank
        name = f"{op.name.partition('::')[2]}_{next(self._numbers)}"
        args, kwargs = with_group(op, func, args, kwargs, lambda name: rank.groups.get(name, name))
        steps = op.require()(rank.result.rank, *args, **kwargs)
        events = collective_events(name, steps, rank.result, rank.outstanding, lambda *_: None)
        answer = None
        while True:
            try:
                event = events.send(answer)
            except StopIteration as stop:
                return stop.value
            answer = rank.ask(event)


__all__ = ["Call", "run_calls"]
