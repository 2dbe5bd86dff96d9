"""Which lines of a pass edited which nodes: recorded by wrapping the methods that edit FX graphs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from torch import fx

from tcverify.application.coverage.recorder import Scope


class EditPlace(NamedTuple):
    """A line of the pass that edited a node.

    Attributes:
        what: "creates", "erases", "rewires", "moves" or "retargets" (assigns `node.target`).
        function: the function that contains the line.
        caller_file, caller_line, caller_function: the line of another function of the pass that called it, if there is one.
    """

    what: str
    file: str
    line: int
    function: str
    caller_file: str = ""
    caller_line: int = 0
    caller_function: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


#: Methods of `fx.Node` that edit the node itself.
_OWN = {
    "replace_input_with": "rewires",
    "update_arg": "rewires",
    "update_kwarg": "rewires",
    "insert_arg": "rewires",
}


class EditRecorder:
    """Records edits and the lines that make them while `watching`.

    Args:
        scope: the files that belong to the pass; an edit is attributed to the innermost line of these on the stack.
    """

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._found: dict[fx.Node, dict[EditPlace, None]] = {}
        self._creating = False
        self._outside: FrameType | None = None  # what applies the pass

    def taken(self) -> dict[str, tuple[EditPlace, ...]]:
        """The locations that edited each node, by its name, in order."""
        found, self._found = self._found, {}
        return {node.name: tuple(places) for node, places in found.items()}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record inside the block."""
        self._outside = sys._getframe(2)  # behind this one and contextlib's
        before: list[tuple[type, str, Any]] = [
            (fx.Graph, name, fx.Graph.__dict__[name]) for name in ("create_node", "erase_node")
        ]
        names = [*_OWN, "prepend", "append", "replace_all_uses_with", "args", "kwargs", "__setattr__"]
        before += [(fx.Node, name, fx.Node.__dict__[name]) for name in names if name in fx.Node.__dict__]
        for owner, name, method in before:
            setattr(owner, name, self._property(method) if isinstance(method, property) else self._method(name, method))
        try:
            yield
        finally:
            self._outside = None
            for owner, name, method in before:
                setattr(owner, name, method)

    def _property(self, wrapped: property) -> property:
        def assign(node: fx.Node, value: Any) -> None:
            self._note("rewires", [node])
            if wrapped.fset is not None:
                wrapped.fset(node, value)

        return property(wrapped.fget, assign, doc=wrapped.__doc__)

    def _method(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(owner: Any, *args: Any, **kwargs: Any) -> Any:
            if name == "replace_all_uses_with":
                self._note("rewires", list(owner.users))
            elif name == "erase_node":
                self._note("erases", [*args, *kwargs.values()][:1])
            elif name in ("prepend", "append"):
                self._note("moves", [] if self._creating else [*args, *kwargs.values()])
            elif name == "__setattr__":
                self._note("retargets", [owner] if args[0] == "target" and not self._creating else [])
            elif name in _OWN:
                self._note(_OWN[name], [owner])
            if name != "create_node":
                return method(owner, *args, **kwargs)
            self._creating = True  # a graph moves it to insert it
            try:
                node = method(owner, *args, **kwargs)
            finally:
                self._creating = False
            self._note("creates", [node])
            return node

        return watched

    def _note(self, what: str, nodes: list[Any]) -> None:
        if not nodes:
            return
        frame = self._of_the_pass(sys._getframe(2))
        if frame is None:
            return
        caller = self._of_the_pass(frame.f_back)
        while caller is not None and caller.f_code is frame.f_code:  # it calls itself
            caller = self._of_the_pass(caller.f_back)
        place = EditPlace(what, *self._place(frame), *(() if caller is None else self._place(caller)))
        for node in nodes:
            if isinstance(node, fx.Node):
                self._found.setdefault(node, {})[place] = None

    def _of_the_pass(self, frame: FrameType | None) -> FrameType | None:
        while frame is not None and frame is not self._outside:
            if self._scope.of(frame.f_code.co_filename) is not None:
                return frame
            frame = frame.f_back
        return None

    def _place(self, frame: FrameType) -> tuple[str, int, str]:
        code = frame.f_code
        return self._scope.of(code.co_filename) or "", frame.f_lineno, getattr(code, "co_qualname", code.co_name)


__all__ = ["EditPlace", "EditRecorder"]
