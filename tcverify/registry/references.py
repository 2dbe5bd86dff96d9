"""Resolves references of the user: passes, and functions that return programs. Importing this module does not import torch."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from tcverify.errors import PassLoadError, UnsupportedOp


def find(target: str, what: str = "pass") -> tuple[Any, ModuleType]:
    """Import the module of a reference, "module:attribute" or "path/file.py:attribute", and return the object that it names.

    Args:
        what: the expected kind of object, for errors.

    Raises:
        PassLoadError: there is no such module or attribute, or importing it fails.
    """
    module_name, _, attribute = target.rpartition(":")
    if not module_name or not attribute:
        raise PassLoadError(f"'{target}' is not a {what}", "write module:attribute or path/to/file.py:attribute")
    module = import_named(module_name)
    subject: Any = module
    for part in attribute.split("."):
        if not hasattr(subject, part):
            raise PassLoadError(f"{module_name} has no '{part}'", _others(subject, part))
        subject = getattr(subject, part)
    return subject, module


def _others(holder: Any, name: str) -> str | None:
    """Suggest what a missing attribute was meant to be: one with a similar name, or what its owner defines."""
    near = difflib.get_close_matches(name, [n for n in vars(holder) if not n.startswith("_")], n=1)
    if near:
        return f"did you mean '{near[0]}'?"
    module = holder.__name__ if isinstance(holder, ModuleType) else holder.__module__
    own = [n for n, v in vars(holder).items() if callable(v) and getattr(v, "__module__", "") == module and n[0] != "_"]
    return f"it defines {', '.join(own[:8])}{', …' if len(own) > 8 else ''}" if own else None


def import_named(name: str) -> ModuleType:
    """Import a module by its name, or a .py file by its path. The current directory is searched as well.

    Raises:
        PassLoadError: it does not exist, or importing it fails.
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
                "modules are imported from the current directory and the environment; a path to a .py file works too",
            ) from None
        raise PassLoadError(f"importing '{name}' fails: {last_frame(error)}") from error
    except SystemExit as error:
        raise PassLoadError(f"importing '{name}' ends the interpreter (exit {error.code})") from None
    except Exception as error:
        raise PassLoadError(f"importing '{name}' fails: {last_frame(error)}") from error


def _execute(name: str) -> ModuleType:
    return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)


def _names_undefined_op(error: AttributeError) -> bool:
    """Whether `error` says that an op of a known dialect is not defined yet; defines the dialect then.

    Not earlier: a pass that uses such ops may import a library that defines them, which takes precedence.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error.obj, torch._ops._OpNamespace):
        return False
    from tcverify.ops import resolve  # this needs torch; names that import without it do not

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
    """Return type, text and innermost location of an error, in one line; for a syntax error, the offending line."""
    if isinstance(error, SyntaxError) and error.filename:
        line = f": {error.text.strip()}" if error.text and error.text.strip() else ""
        return f"{type(error).__name__}: {error.msg} ({error.filename}:{error.lineno}{line})"
    frames = traceback.extract_tb(error.__traceback__)
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{at}"


__all__ = ["find", "import_named", "last_frame"]
