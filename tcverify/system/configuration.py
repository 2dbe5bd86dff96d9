"""[tool.tcverify] of a pyproject.toml: defaults of options. Reading it does not import torch."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tcverify.errors import UsageError

#: Options that name a file or a directory, by the names of their parameters.
_PATHS = ("report_dir", "baseline", "write_baseline", "corpus")


def configuration(path: Path, known: Iterable[str] | None = None) -> dict[str, Any]:
    """Read defaults of options from [tool.tcverify] of a pyproject.toml.

    Args:
        known: names of the options, with underscores; None takes any.

    Raises:
        UsageError: it cannot be read, or has an unknown option.
    """
    options = {}
    for key, value in section(path).items():
        name = key.replace("-", "_")
        if name in ("extension", "op_law"):
            continue  # see `load_configured_extensions`
        if known is not None and name not in known:
            raise UsageError(
                f"[tool.tcverify] in {path} has an unknown key '{key}'",
                suggest(key, [n.replace("_", "-") for n in known], "keys"),
            )
        options[name] = _default(key, value, path)
    return options


def section(path: Path) -> dict[str, Any]:
    """Return [tool.tcverify] of a pyproject.toml; empty if there is none."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    if not path.is_file():
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from None
    found = table.get("tool", {})
    found = found.get("tcverify", {}) if isinstance(found, dict) else found
    if not isinstance(found, dict):
        raise UsageError(f"[tool.tcverify] in {path} is not a table", "write [tool.tcverify] and a line per option")
    return found


def _default(key: str, value: Any, path: Path) -> Any:
    """The value of one option: lists and tables correspond to commas and = on the command line."""
    if key in ("contract", "pass-option", "pass_option"):
        if not isinstance(value, dict):
            raise UsageError(f"[tool.tcverify] in {path}: {key} is not a table", f"write {key} = {{ name = value }}")
        return [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in value.items()]
    if key.replace("-", "_") in _PATHS and not (isinstance(value, str) and value):
        raise UsageError(f"[tool.tcverify] in {path}: {key} is not a path", f'write {key} = "path"')
    if key == "passes":
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise UsageError(f"[tool.tcverify] in {path}: passes is not a list", 'write passes = ["module:attribute"]')
        return value
    if isinstance(value, list):
        return ",".join(map(str, value))
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items())
    return value


def suggest(name: str, known: Sequence[str], what: str) -> str:
    """Return a hint that names the nearest of the known names, or all."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean '{near[0]}'?" if near else f"{what} are {', '.join(sorted(known))}"


__all__ = ["configuration", "section", "suggest"]
