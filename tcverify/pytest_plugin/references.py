"""How a pass that a test names is found by other processes: by its module where they can import it, else by its file."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from tcverify.application.loading import importable_target
from tcverify.cli.arguments import parse_target
from tcverify.errors import UsageError
from tcverify.passes import BUILTIN


@dataclass(frozen=True, slots=True)
class Reference:
    """A pass that a test names.

    Attributes:
        label: what ids of items call it.
        targets: how other processes may find it, the best first; none when they cannot.
        subject: the pass itself, when only this process has it.
    """

    label: str
    targets: tuple[str, ...]
    subject: Any = None


def reference_to(pass_: Any, start_dir: Path, fresh_path: Sequence[str]) -> Reference:
    """Find out how to refer to a pass.

    Args:
        pass_: as `verifies` takes it.
        start_dir: the directory from which pytest was started, and from which files are named.
        fresh_path: where every other process looks for modules.

    Raises:
        UsageError: it is no pass.
    """
    if isinstance(pass_, str):
        found = parse_target(pass_)
        file, _, _ = found.rpartition(":")
        if file.endswith(".py") and not (start_dir / file).is_file():
            raise UsageError(f"there is no file {file}", f"give its path from {start_dir}")
        label = pass_ if pass_ in BUILTIN else found.rpartition(":")[2]
        return Reference(label, (found,))
    if not callable(pass_):
        raise UsageError(
            f"{repr(pass_)[:80]} is not a pass",
            "give a class, a function, an instance, or a name such as module:attribute",
        )
    label = str(getattr(pass_, "__name__", None) or getattr(pass_, "name", None) or type(pass_).__name__)
    found_by_name = importable_target(pass_)
    if found_by_name is None:
        return Reference(label.strip("<>"), (), pass_)
    return Reference(label, _targets(pass_, found_by_name, start_dir, fresh_path))


def _targets(pass_: Any, by_module: str, start_dir: Path, fresh_path: Sequence[str]) -> tuple[str, ...]:
    """By module, and for modules that only pytest knows how to find (test files, what stands beside them) by file first."""
    module, _, attribute = by_module.rpartition(":")
    file = None
    with contextlib.suppress(TypeError, OSError):
        file = inspect.getsourcefile(pass_)
    if file is None or _is_found(module, [str(start_dir), *fresh_path]):
        return (by_module,)
    path = os.path.relpath(file, start_dir) if Path(file).is_relative_to(start_dir) else os.path.abspath(file)
    return (f"{path}:{attribute}", by_module)


def _is_found(module: str, path: Sequence[str]) -> bool:
    """Whether a process that looks along `path` imports the module that we have."""
    package = module.partition(".")[0]
    known = getattr(sys.modules.get(package), "__spec__", None)
    found = PathFinder.find_spec(package, path)
    if found is None or known is None:
        return False
    if found.origin is None:  # a namespace package: its places count
        return set(known.submodule_search_locations or ()) <= set(found.submodule_search_locations or ())
    return known.origin is not None and os.path.realpath(found.origin) == os.path.realpath(known.origin)
