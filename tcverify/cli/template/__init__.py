"""The files that `tcverify init` writes into a repository: tests of its passes, a matrix of torch versions, a workflow,
a configuration."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined

from tcverify.cli.arguments import parse_target
from tcverify.errors import UsageError
from tcverify.system.configuration import section
from tcverify.system.files import write_atomically

#: The pass that is written if none is named, and its reference.
EXAMPLE_FILE = "example_pass.py"
EXAMPLE = "example_pass:fuse_add_norm"

#: Torch versions of the matrix, by the factor that names them in tox.
TORCH = {"torch29": "2.9.*", "torch211": "2.11.*", "torch213": "2.13.*"}

_TABLE = re.compile(r"(?m)^\s*\[\s*tool\s*\.\s*[\"']?tcverify[\"']?\s*[].]")


#: How a file to be written compares with the existing one; see `PlannedFile`.
FileState: TypeAlias = Literal["new", "same", "changed", "longer"]


@dataclass(frozen=True)
class PlannedFile:
    """A file to be written.

    Attributes:
        path: relative to the directory.
        text: the whole file.
        state: "new", "same" (it exists with this text), "changed" (it exists with another text) or "longer" (a
            file of the user to which a table is appended).
    """

    path: str
    text: str
    state: FileState


@dataclass(frozen=True)
class TemplatePlan:
    """What `tcverify init` would do.

    Attributes:
        files: the files to write, in order.
        advice: lines about a file that is left unchanged, and what may be added to it.
    """

    directory: Path
    files: tuple[PlannedFile, ...]
    advice: tuple[str, ...]
    passes: tuple[str, ...]

    @property
    def _where(self) -> str:
        return "here" if self.directory.resolve() == Path.cwd() else f"in {self.directory}"

    def write(self, *, force: bool = False, keep: bool = False) -> list[PlannedFile]:
        """Write the files and return them.

        Args:
            force: overwrite files with other contents.
            keep: keep such files and write the others.

        Raises:
            UsageError: there are such files and neither is set, or there is nothing to write (then nothing is written); or a
                file cannot be written.
        """
        changed = [file.path for file in self.files if file.state == "changed"]
        if changed and not (force or keep):
            them = "it" if len(changed) == 1 else "them"
            raise UsageError(
                f"{', '.join(changed)}: would be overwritten {self._where}; nothing was written",
                f"--force overwrites {them}, --keep writes only the other files, --dry-run shows what would be done",
            )
        written = [file for file in self.files if file.state != "same" and not (keep and file.state == "changed")]
        if not written:
            raise UsageError(
                f"{', '.join(file.path for file in self.files)}: all already exist {self._where}; nothing was written",
                "remove the files that should be written again",
            )
        for file in written:
            write_atomically(self.directory / file.path, file.text, "choose a writable directory")
        return written


def plan_template(directory: Path, passes: Sequence[str]) -> TemplatePlan:
    """Plan the files that are written into a directory.

    Args:
        passes: references of the passes to verify, as `tcverify run` takes them; none means an example.

    Raises:
        UsageError: the directory is a file, or a reference is malformed.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is not a directory", "give the root of the repository")
    for reference in passes:
        _require_reference(directory, reference)
    chosen = tuple(dict.fromkeys(passes)) or (EXAMPLE,)
    names = _test_names(chosen)
    packaged = any((directory / name).is_file() for name in ("setup.py", "setup.cfg")) or _declares_project(directory)
    known = _read(directory / "pyproject.toml")
    theirs = known is not None and _TABLE.search(known) is not None
    # An existing table is left unchanged, even if it names no passes.
    named = "".join(f"{one} " for one in chosen) if theirs and not _names_passes(directory) else ""
    render = _renderer(
        passes=list(zip(chosen, names, strict=True)), packaged=packaged, torch=TORCH, example=not passes, named=named
    )
    files = []
    if not passes:
        files.append(_planned(directory, EXAMPLE_FILE, render("example_pass.py.j2")))
    files += [
        _planned(directory, "tests/test_passes.py", render("test_passes.py.j2")),
        _planned(directory, "tox.ini", render("tox.ini.j2")),
        _planned(directory, ".github/workflows/tcverify.yml", render("tcverify.yml.j2")),
    ]
    table, advice = render("pyproject.toml.j2"), []
    if known is None:
        files.append(PlannedFile("pyproject.toml", table, "new"))
    elif theirs:
        advice.append("pyproject.toml already has [tool.tcverify] and is not changed; the default table is")
        advice += [f"    {line}" for line in table.strip().splitlines()]
    else:
        gap = "" if not known else "\n" if known.endswith("\n") else "\n\n"
        files.append(PlannedFile("pyproject.toml", known + gap + table, "longer"))
    return TemplatePlan(directory, tuple(files), tuple(advice), chosen)


_DID = {"new": "wrote", "changed": "overwrote", "longer": "added [tool.tcverify] to"}
_WOULD = {
    "new": "would write", "changed": "exists with other contents:", "longer": "would add [tool.tcverify] to",
    "same": "exists already:",
}  # fmt: skip


def describe_plan(planned: TemplatePlan) -> list[str]:
    """Describe what would be done, in lines."""
    return [*(f"{_WOULD[file.state]} {file.path}" for file in planned.files), *planned.advice]


def describe_result(planned: TemplatePlan, written: Sequence[PlannedFile]) -> list[str]:
    """Describe what was done and what to do next, in lines."""
    left = [file.path for file in planned.files if file not in written]
    return [
        *(f"{_DID[file.state]} {file.path}" for file in written),
        *(f"skipped {path}" for path in left),
        *planned.advice,
        "",
        "Next:",
        *([] if planned.directory.resolve() == Path.cwd() else [f"  cd {planned.directory}"]),
        "  pip install tcverify pytest pytest-xdist",
        f"  tcverify run {planned.passes[0]} --max-examples 50",
        "  pytest -n auto tests/test_passes.py",
        "Then add reports/ and .tcverify/ to .gitignore.",
    ]


def _require_reference(directory: Path, reference: str) -> None:
    if not re.fullmatch(r"[\w.:/+-]+", reference):
        raise UsageError(f"'{reference}' is not a pass", "write module:attribute or path/to/file.py:attribute")
    for stage in parse_target(reference).split("+"):
        file = stage.rpartition(":")[0]
        if file.endswith(".py") and not (directory / file).is_file():
            raise UsageError(
                f"there is no file {file} in {directory}", "paths are relative to the root of the repository"
            )


def _test_names(passes: Sequence[str]) -> list[str]:
    """Names for test functions: the lower-case names of the passes, numbered where two are equal."""
    found: list[str] = []
    for reference in passes:
        words = [stage.rpartition(":")[2].rpartition(".")[2] for stage in reference.split("+")]
        spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", "_then_".join(words))
        name = re.sub(r"\W+", "_", spaced).lower()
        number = 2
        while (name if number == 2 else f"{name}_{number - 1}") in found:
            number += 1
        found.append(name if number == 2 else f"{name}_{number - 1}")
    return found


def _renderer(**variables: object) -> Callable[[str], str]:
    environment = Environment(
        loader=PackageLoader("tcverify.cli.template", "files"), undefined=StrictUndefined, keep_trailing_newline=True,
        trim_blocks=True, lstrip_blocks=True, autoescape=False,
    )  # fmt: skip
    return lambda name: environment.get_template(name).render(**variables)


def _planned(directory: Path, path: str, text: str) -> PlannedFile:
    known = _read(directory / path)
    return PlannedFile(path, text, "new" if known is None else "same" if known == text else "changed")


def _read(path: Path) -> str | None:
    """The text of a file, or None if there is no such file. Raises UsageError if it cannot be read."""
    if not path.exists():
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}", "fix it, or choose another directory") from None


def _names_passes(directory: Path) -> bool:
    """Whether [tool.tcverify] defines what `tcverify run` verifies."""
    return "passes" in section(directory / "pyproject.toml")


def _declares_project(directory: Path) -> bool:
    """Whether pyproject.toml describes how the repository is installed."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        table = tomllib.loads(_read(directory / "pyproject.toml") or "")
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{directory / 'pyproject.toml'} cannot be read: {error}", "fix it first") from None
    return "project" in table or "build-system" in table


__all__ = ["EXAMPLE", "PlannedFile", "TemplatePlan", "describe_plan", "describe_result", "plan_template"]
