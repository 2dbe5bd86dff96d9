"""The base of all passes: name, contract, options, enable flag, dump, and the final steps of every rewrite."""

from __future__ import annotations

import inspect
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, ClassVar

from torch import fx

from tcverify.errors import UsageError
from tcverify.passes.editing import erase_unused
from tcverify.program import Contract

_DISABLED: ContextVar[frozenset[str]] = ContextVar("disabled passes", default=frozenset())


@contextmanager
def disable_passes(*names: str) -> Iterator[None]:
    """Make passes of these names do nothing inside the block, wherever they are created and called.

    Example:
        >>> with disabled("sequence_parallel"):
        ...     compile(model)
    """
    token = _DISABLED.set(_DISABLED.get() | set(names))
    try:
        yield
    finally:
        _DISABLED.reset(token)


class Pass(ABC):
    """A pass over the graph of one rank. Works in place.

    Subclasses set the class attributes and write `rewrite`. Options are keyword arguments of the constructor and may come as
    the strings of a command line.

    Args:
        enabled: whether calls rewrite anything; see also `disabled`.
        dump: directory to which every call writes the program after the pass; created if missing.

    Attributes:
        name: its name for users.
        contract: its promises besides preserving the meaning of the program.
        PATTERNS: names of the rewrites it knows.
        rewrites: how often the last call applied each pattern.

    Raises:
        UsageError: an unknown option, an invalid value of an option, or a dump directory that cannot be created.
    """

    name: ClassVar[str]
    contract: ClassVar[Contract] = Contract(metadata=True)
    PATTERNS: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, *, enabled: bool | str = True, dump: str | os.PathLike[str] | None = None, **unknown: Any
    ) -> None:
        if unknown:
            known = ", ".join(self.options())
            raise UsageError(f"pass '{self.name}' has no option '{next(iter(unknown))}'", f"its options are {known}")
        self.enabled = self._boolean("enabled", enabled)
        self.rewrites: dict[str, int] = dict.fromkeys(self.PATTERNS, 0)
        self._dump = None if dump is None else Path(dump)
        if self._dump is not None:
            try:
                self._dump.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise self._unwritable(self._dump, error) from error

    @classmethod
    def options(cls) -> list[str]:
        """Names of the options, sorted."""
        names: set[str] = set()
        for kind in cls.__mro__:
            constructor = vars(kind).get("__init__")
            if inspect.isfunction(constructor):
                parameters = inspect.signature(constructor).parameters.values()
                names.update(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)
        return sorted(names)

    @abstractmethod
    def rewrite(self, graph: fx.Graph) -> Iterable[fx.Node]:
        """Rewrite `graph` in place and count into `self.rewrites`.

        Returns:
            The nodes that lost users. Those that are unused now are erased.
        """

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        """Rewrite `gm` in place and return it. If nothing matches, or the pass is off, `gm` is not touched at all.

        Raises:
            UsageError: the dump cannot be written.
        """
        self.rewrites = dict.fromkeys(self.PATTERNS, 0)
        if not self.enabled or self.name in _DISABLED.get():
            return gm
        displaced = self.rewrite(gm.graph)
        if any(self.rewrites.values()):
            erase_unused(gm.graph, displaced)
            gm.graph.lint()
            gm.recompile()
        if self._dump is not None:
            self._write(self._dump, gm)
        return gm

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Switch this pass off inside the block; afterwards the flag is what it was before."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def _write(self, directory: Path, gm: fx.GraphModule) -> None:
        counts = ", ".join(f"{pattern}: {count}" for pattern, count in self.rewrites.items()) or "no patterns"
        text = f"# after {self.name} ({counts})\n{gm.print_readable(print_output=False)}\n"
        stem = re.sub(r"[^\w.-]", "_", self.name)
        number = 0
        while True:  # calls for other ranks, possibly in other processes, write to the same directory
            path = directory / f"{stem}-{number:04d}.txt"
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
                return
            except FileExistsError:
                number += 1
            except OSError as error:
                raise self._unwritable(path, error) from error

    def _unwritable(self, path: Path, error: OSError) -> UsageError:
        return UsageError(
            f"pass '{self.name}' cannot write its dump to {path}: {error.strerror or error}",
            "give option dump a writable directory",
        )

    def _boolean(self, option: str, value: object) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise UsageError(f"option {option} of pass '{self.name}' cannot be {value!r}", "use true or false")

    def _whole_number(self, option: str, value: object, least: int) -> int:
        """Read a whole number."""
        try:
            number = int(str(value))
        except ValueError:
            number = least - 1
        if number < least:
            raise UsageError(
                f"option {option} of pass '{self.name}' cannot be {value!r}", f"use a whole number of at least {least}"
            )
        return number

    def _choice(self, option: str, value: object, known: Iterable[str]) -> frozenset[str]:
        """Read a list of names, separated by commas."""
        names = value.split(",") if isinstance(value, str) else value
        allowed = tuple(known)
        chosen: set[str] = set()
        for name in names if isinstance(names, (list, tuple, set, frozenset)) else [names]:
            plain = name.strip() if isinstance(name, str) else name
            if plain not in allowed:
                raise UsageError(
                    f"option {option} of pass '{self.name}' cannot be {value!r}: there is no {plain!r}",
                    f"name some of {', '.join(allowed)}, separated by commas",
                )
            chosen.add(plain)
        return frozenset(chosen)
