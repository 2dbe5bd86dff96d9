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
    """What to record of one application of a pass.

    Attributes:
        points: locations to report even if earlier programs have reached them.
        look: whether to report the nodes that conditions are about; see `PassTrace.looked`.
        edits: whether to report the lines that edited each node; see `PassTrace.edited`.
        judge: whether to return the rewritten program and its defects; otherwise only coverage is reported.
    """

    points: frozenset[CodePoint] = frozenset()
    look: bool = False
    edits: bool = False
    judge: bool = True


class WatchedPass:
    """A loaded pass whose coverage is recorded.

    Args:
        covered: names of the modules whose code counts; an empty list means those that define the pass.
        brief: an unwatched application that took less than this many seconds may be repeated and watched.

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
        """The vocabulary of the pass."""
        return vocabulary_of(self._scope)

    def apply(self, program: Program, *, deep: bool = False, watch: Watch | None = None) -> Pair:
        """Apply the pass as `apply_pass` does, and record what it reached for the first time, or what `watch` requests.

        Args:
            watch: None watches some programs, if watching costs time; see `Recorder.taken`.
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
        """Report again what the last application reached for the first time, if that report was lost; or `everything`."""
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
        """The pass, and its stages, watched while they are called, but not while their results are judged."""

        def call(module: fx.GraphModule) -> Any:
            with self._recorder.watching():
                return loaded.call(module)

        return replace(loaded, call=call, stages=tuple(map(self._watched, loaded.stages)))


def _outcome(pair: Pair) -> Hashable:
    """What a pass has done to a program, as far as it may be due to other code of the pass."""
    aspects = frozenset(defect.aspect for defect in pair.defects)
    failure = pair.failure.kind if pair.failure is not None else None
    return pair.changed, pair.declined is not None, failure, aspects, frozenset(pair.rewrites)


__all__ = ["Watch", "WatchedPass"]
