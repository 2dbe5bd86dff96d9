"""Extensions: modules of the user's that register dialects, checks, strategies and executors when they are imported.

Ranks and workers are processes of their own, so what an extension registers in one of them is unknown to the others.
`load_extension` imports a module here and has every process that is started from then on import it as well.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tcverify.errors import PassLoadError, UnsupportedOp, UsageError
from tcverify.ops import resolve

#: References of the extensions that are loaded, in order.
_LOADED: list[str] = []


def load_extension(reference: str) -> ModuleType:
    """Import an extension, here and in every process that tcverify starts from now on.

    Args:
        reference: the name of a module, or the path of a .py file as seen from the current directory.

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
    """Return the references of the extensions that are loaded: names of modules, absolute paths of files."""
    return tuple(_LOADED)


def extensions_here() -> dict[str, list[str]]:
    """Return what another process needs to load the same extensions, as JSON can hold it."""
    return {"references": list(_LOADED), "path": [str(Path.cwd()), *sys.path]} if _LOADED else {}


def load_extensions_of(parent: Mapping[str, Any]) -> None:
    """Load the extensions of another process, as its `extensions_here` tells them. Raises as `load_extension`."""
    if parent:
        sys.path[:] = parent["path"]
        for reference in parent["references"]:
            load_extension(reference)


def require_new(what: str, name: Any, known: Collection[str]) -> None:
    """Raise `UsageError` unless a check, a strategy or an executor ("what") can be registered under a name.

    Args:
        known: the names of tcverify's own, which are not replaced.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{name!r:.80} cannot name a {what}", "use letters, digits, hyphens and underscores")
    if name in known:
        raise UsageError(f"'{name}' is a {what} of tcverify's", "give yours another name")


_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


# ---------------------------------------------------------------------------------------------------------- importing


def import_named(name: str) -> ModuleType:
    """Import a module by its name, or a .py file by its path. The current directory counts.

    Raises:
        PassLoadError: it is not there, or importing it fails.
    """
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        try:
            return _execute(name)
        except AttributeError as error:
            if not _names_undefined_op(error):
                raise
            return _execute(name)
    except PassLoadError:
        raise
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(error.name + ".")):
            raise PassLoadError(
                f"there is no module '{error.name}'",
                "modules are looked up from the current directory and the environment; a path to a .py file works too",
            ) from None
        raise PassLoadError(f"importing '{name}' fails: {last_frame(error)}") from error
    except SystemExit as error:
        raise PassLoadError(f"importing '{name}' ends the interpreter (exit {error.code})") from None
    except Exception as error:
        raise PassLoadError(f"importing '{name}' fails: {last_frame(error)}") from error


def _execute(name: str) -> ModuleType:
    return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)


def _names_undefined_op(error: AttributeError) -> bool:
    """Whether `error` is that nobody has defined an op of a known dialect yet, and define it.

    Not before: a pass that names such ops may come with a library that defines them, which goes first.
    """
    if not isinstance(error.obj, torch._ops._OpNamespace):
        return False
    try:
        resolve(f"{error.obj.name}::{error.name}")
    except UnsupportedOp:
        return False
    return True


def _import_file(path: Path) -> ModuleType:
    resolved = path.resolve()
    if not resolved.is_file():
        raise PassLoadError(f"there is no file {path}", "give the path from the current directory")
    name = "tcverify_pass_" + hashlib.sha256(str(resolved).encode()).hexdigest()[:12]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, resolved)
    if spec is None or spec.loader is None:
        raise PassLoadError(f"{path} cannot be imported as a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(resolved.parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(resolved.parent))
    return module


def last_frame(error: BaseException) -> str:
    """Return type, text and innermost place of an error, in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


__all__ = [
    "extensions_here",
    "import_named",
    "last_frame",
    "load_extension",
    "load_extensions_of",
    "loaded_extensions",
    "require_new",
]
