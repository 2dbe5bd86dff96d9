"""A pass that is watched while it runs: which lines of its code it reaches, and which nodes its conditions are about."""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from tcverify.application.apply import apply_pass
from tcverify.application.coverage.recorder import CodePoint, Recorder, scope_of
from tcverify.application.coverage.vocabulary import Vocabulary, vocabulary_of
from tcverify.application.edit_log import EditPlace, EditRecorder
from tcverify.application.loading import LoadedPass
from tcverify.application.pair import Pair
from tcverify.program import Program


@dataclass(frozen=True, slots=True)
class Watch:
    """What an application of a pass is to be watched for.

    Attributes:
        points: places that are reported if they are reached, though other programs have reached them before.
        look: whether the nodes that conditions are about are reported; see `PassTrace.looked`.
        edits: whether the lines that edited each node are reported; see `PassTrace.edited`.
        judge: whether the rewritten program is wanted, and what is wrong with it; else what is reached is all that is reported.
    """

    points: frozenset[CodePoint] = frozenset()
    look: bool = False
    edits: bool = False
    judge: bool = True


class WatchedPass:
    """A loaded pass of which it is recorded what it reaches of its code.

    Args:
        covered: names of the modules whose code counts; none for those that define the pass.
        brief: seconds below which an application that was not watched may be repeated, now watched.

    Attributes:
        files: those that define the pass.
    """

    def __init__(self, loaded: LoadedPass, covered: Sequence[str] = (), brief: float = 0.0) -> None:
        self._scope = scope_of([one.subject for one in loaded.stages or (loaded,)], covered)
        self._recorder = Recorder(self._scope)
        self._plain = loaded
        self._loaded = self._watched(loaded) if self._recorder.traces else loaded
        self._brief = brief
        self._last: list[CodePoint] = []
        self.files = self._scope.files

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What the pass names."""
        return vocabulary_of(self._scope)

    def apply(self, program: Program, *, deep: bool = False, watch: Watch | None = None) -> Pair:
        """Apply the pass as `apply_pass` does, and say what it has reached for the first time, or is watched for.

        Args:
            watch: None watches some programs, where watching costs time; see `Recorder.taken`.
        """
        self._last = []
        if watch is not None and watch.edits:
            return self._edits_of(program, deep)
        recorder = self._recorder
        if watch is not None:
            recorder.ask(watch.points, look=watch.look)
        start = time.monotonic()
        pair = apply_pass(self._loaded, program, deep=deep, judge=watch is None or watch.judge)
        if watch is None and time.monotonic() - start < self._brief and recorder.misses(_outcome(pair)):
            apply_pass(self._loaded, program)
        pair.trace.reached, pair.trace.looked = recorder.taken(), recorder.looked()
        self._last = pair.trace.reached
        return pair

    def forget(self, *, everything: bool = False) -> None:
        """Say again what the last application has reached for the first time, of which nobody has taken note; or `everything`."""
        self._recorder.forget(None if everything else self._last)
        self._last = []

    def _edits_of(self, program: Program, deep: bool) -> Pair:
        """Apply the pass and record, rank by rank, which lines edit which nodes."""
        recorder = EditRecorder(self._scope)
        edited: list[dict[str, tuple[EditPlace, ...]]] = []

        def call(module: fx.GraphModule) -> Any:
            with recorder.watching():
                returned = self._plain.call(module)
            edited.append(recorder.taken())
            return returned

        pair = apply_pass(replace(self._plain, call=call, stages=()), program, deep=deep)
        pair.trace.edited = edited[: program.world_size]
        return pair

    def _watched(self, loaded: LoadedPass) -> LoadedPass:
        """The pass, and its stages, watched while they are called, and not while their results are judged."""

        def call(module: fx.GraphModule) -> Any:
            with self._recorder.watching():
                return loaded.call(module)

        return replace(loaded, call=call, stages=tuple(map(self._watched, loaded.stages)))


def _outcome(pair: Pair) -> Hashable:
    """What a pass has done to a program, as far as other code of it may have done that."""
    aspects = frozenset(defect.aspect for defect in pair.defects)
    failure = pair.failure.kind if pair.failure is not None else None
    return pair.changed, pair.declined is not None, failure, aspects, frozenset(pair.rewrites)


__all__ = ["Watch", "WatchedPass"]
