"""Extensions: modules of the user that register dialects, checks, strategies and executors when they are imported.

Ranks and workers are processes of their own, so what an extension registers in one of them is unknown to the
others. `load_extension` imports a module here and in every process that is started later.
`declare_op_law` does the same for laws of ops.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from tcverify.errors import PassLoadError, UsageError
from tcverify.registry.op_laws import declare_op_law, declared_op_laws
from tcverify.registry.references import import_named

#: References of the loaded extensions, in order.
_LOADED: list[str] = []


def load_extension(reference: str) -> ModuleType:
    """Import an extension, here and in every process that tcverify starts later.

    Args:
        reference: the name of a module, or the path of a .py file, relative to the current directory.

    Raises:
        UsageError: it cannot be found or imported.

    Example:
        >>> load_extension("mycompiler/tcverify_ops.py")
    """
    if not isinstance(reference, str) or not reference or ":" in reference:
        raise UsageError(f"{reference!r:.80} is not an extension", "name a module, or the path of a .py file")
    known = str(Path(reference).resolve()) if reference.endswith(".py") else reference
    try:
        module = import_named(known)
    except PassLoadError as error:
        raise UsageError(f"extension '{reference}': {error.message}", error.hint) from error
    if known not in _LOADED:
        _LOADED.append(known)
    return module


def loaded_extensions() -> tuple[str, ...]:
    """Return the references of the loaded extensions: names of modules, absolute paths of files."""
    return tuple(_LOADED)


def list_extension_state() -> tuple[str, ...]:
    """Return the extensions and laws that processes started now know."""
    return (*_LOADED, *declared_op_laws())


def extensions_here() -> dict[str, list[str]]:
    """Return what another process needs to load the same extensions and laws, as JSON-compatible data."""
    if not list_extension_state():
        return {}
    return {"references": list(_LOADED), "laws": list(declared_op_laws()), "path": [str(Path.cwd()), *sys.path]}


def load_extensions_of(parent: Mapping[str, Any]) -> None:
    """Load the extensions of another process, as returned by its `extensions_here`. Raises as `load_extension` does."""
    if parent:
        sys.path[:] = parent["path"]
        for reference in parent["references"]:
            load_extension(reference)
        for law in parent["laws"]:
            declare_op_law(law)


def require_new(what: str, name: Any, known: Collection[str]) -> None:
    """Raise `UsageError` unless a check, a strategy or an executor ("what") can be registered under a name.

    Args:
        known: built-in names, which cannot be replaced.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{name!r:.80} cannot name a {what}", "use letters, digits, hyphens and underscores")
    if name in known:
        raise UsageError(f"'{name}' is a built-in {what}", "choose another name")


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


__all__ = [
    "extensions_here",
    "list_extension_state",
    "load_extension",
    "load_extensions_of",
    "loaded_extensions",
    "require_new",
]
