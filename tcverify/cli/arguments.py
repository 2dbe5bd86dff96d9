"""Parses the command line and the configuration: passes, meshes, times, names.

This imports torch only if a module of the user, which has to be loaded, imports it.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tcverify.cases.baseline import Baseline, KnownFinding, read_baseline
from tcverify.errors import UsageError
from tcverify.pytorch import PREFIX, SUBJECTS, subject
from tcverify.registry.checks import CHECKS
from tcverify.registry.choices import Word, is_one_of
from tcverify.registry.executors import MAX_RANKS, MOST_RANKS
from tcverify.registry.extensions import load_extension
from tcverify.registry.op_laws import declare_op_law
from tcverify.registry.passes import BUILTIN, SUITED, reference_of, stage_names
from tcverify.registry.pipelines import SEPARATOR
from tcverify.registry.strategies import DEFAULT_STRATEGY, STRATEGIES, WORLD_SIZES, join_strategy_names
from tcverify.system.configuration import section, suggest
from tcverify.system.files import write_atomically


def load_configured_extensions(path: Path) -> None:
    """Load the extensions and declare the laws of ops that [tool.tcverify] of a pyproject.toml names.

    Paths are relative to that file.

    Raises:
        UsageError: the file cannot be read, an extension cannot be imported, or a law is malformed.
    """
    for reference in _listed(path, "extension", "mycompiler.ops"):
        load_extension(str(path.parent / reference) if reference.endswith(".py") else reference)
    for law in _listed(path, "op-law", "my::rope=rowwise(1)"):
        declare_op_law(law)


def _listed(path: Path, name: str, example: str) -> list[str]:
    given = section(path).get(name, [])
    listed = [given] if isinstance(given, str) else given
    if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
        raise UsageError(f"[tool.tcverify] in {path}: {name} is not a list", f'write {name} = ["{example}"]')
    return listed


def parse_pairs(values: Sequence[str], option: str) -> dict[str, str]:
    """Parse values of the form name=value. Raises UsageError."""
    found: dict[str, str] = {}
    for value in values:
        key, separator, text = value.partition("=")
        if not separator or not key:
            raise UsageError(f"{option} {value} does not have the form name=value")
        if key in found:
            raise UsageError(f"{option} names '{key}' twice")
        found[key] = text
    return found


def parse_names(text: str, known: Sequence[Word], what: str) -> list[Word]:
    """Parse known names, separated by commas. Raises UsageError for unknown names, or none at all."""
    found: list[Word] = []
    for name in (part.strip() for part in text.split(",") if part.strip()):
        if not is_one_of(name, known):
            raise UsageError(f"there is no {what} '{name}'", suggest(name, known, f"{what}s"))
        found.append(name)
    if not found:
        raise UsageError(f"no {what} given", f"{what}s are {', '.join(known)}")
    return found


def parse_checks(text: str | None) -> list[str] | None:
    """Parse --checks: names, or references module:attribute to checks, which are registered under the attribute's name.

    Returns:
        The names, or None, which means all, if none are given.

    Raises:
        UsageError: there is no such check.
    """
    if text is None:
        return None
    chosen = []
    for piece in text.split(","):
        name, check = _referenced(piece.strip(), "check")
        if check is not None:
            from tcverify.checks import register_check

            register_check(name, check)
        chosen.append(name)
    return parse_names(",".join(chosen), list(CHECKS), "check")


def _referenced(text: str, what: str) -> tuple[str, Any]:
    """Return the name in `text` and None; for a reference module:attribute, the attribute's name and its value.

    The module is loaded as an extension, since it may register things that every process needs.
    """
    module_name, _, attribute = text.rpartition(":")
    if not module_name:
        return text, None
    module = load_extension(module_name)
    if not hasattr(module, attribute):
        known = [name for name in vars(module) if not name.startswith("_")]
        raise UsageError(f"{module_name} has no {what} '{attribute}'", suggest(attribute, known, "its names"))
    return attribute, getattr(module, attribute)


def parse_target(name: str) -> str:
    """Return the reference of a pass, or of a pipeline "first+second". Built-in names are resolved; anything else must have the
    form module:attribute.

    Raises:
        UsageError: it has another form.
    """
    stages = stage_names(name)
    if len(stages) > 1:
        return SEPARATOR.join(map(parse_target, stages))
    if name in BUILTIN or ":" in name:
        return reference_of(name)
    if name.endswith(".py") or Path(name).exists():
        raise UsageError(f"'{name}' does not name a pass in the file", f"write {name}:MyPass")
    near = difflib.get_close_matches(name, list(BUILTIN), n=1)
    hint = f"did you mean '{near[0]}'?" if near else "`tcverify passes` lists the built-in ones."
    raise UsageError(
        f"there is no built-in pass '{name}'", f"{hint} Your own: module:attribute or path/to/file.py:attribute"
    )


def parse_strategies(given: str | None, passes: Sequence[str | None]) -> list[str | None]:
    """Return the strategy for each pass (None: it has no name), named as on the command line: the given one or several, or
    else the default of the pass.

    A reference module:attribute is registered under the attribute's name. None: strategies have to be found by trial.

    Raises:
        UsageError: there is no such strategy, or strategies cannot be combined.
    """
    if given is not None:
        name, programs = _referenced(given, "strategy")
        if programs is not None:
            from tcverify.strategies import register_strategy

            register_strategy(name, programs)
        return [join_strategy_names(parse_names(name, list(STRATEGIES), "strategy"))] * len(passes)
    known = {**SUITED, **{PREFIX + one.name: one.strategy for one in SUBJECTS.values()}}
    suited: list[str | None] = []
    for pass_ in passes:
        stages = [] if pass_ is None else stage_names(pass_)
        ours = DEFAULT_STRATEGY if any(stage in BUILTIN for stage in stages) else None
        suited.append(next((known[stage] for stage in stages if stage in known), ours))
    return suited


def list_covered_modules(name: str) -> list[str]:
    """Return the modules whose code counts as that of a pass or pipeline; an empty list means the files that define it.

    Adapter classes of tcverify call PyTorch's own passes; they are not what is verified.
    """
    stages = stage_names(name)
    return [subject(stage).source.partition(":")[0] for stage in stages if stage.startswith(PREFIX)]


def list_option_draws(name: str, fixed: Collection[str]) -> dict[str, Sequence[Any]]:
    """Return the values from which the options of a pass, or of the stages of a pipeline, are drawn for each program.

    Args:
        fixed: options that the user has given.
    """
    stages = stage_names(name)
    found: dict[str, Sequence[Any]] = {}
    for stage in stages:
        if stage.startswith(PREFIX):
            found.update((key, values) for key, values in subject(stage).draws.items() if key not in fixed)
    return found


def parse_meshes(
    world_size: str | None, mesh: str | None, most: int = MAX_RANKS, default: Sequence[int] = WORLD_SIZES
) -> list[tuple[str, dict[str, int] | None, int]]:
    """Parse --world-size and --mesh.

    Args:
        most: largest number of ranks.
        default: numbers of ranks if neither is given.

    Returns:
        Name, sizes of the mesh dims (None for drawn sizes) and world size of each campaign.

    Raises:
        UsageError: they are invalid.
    """
    if mesh is not None:
        if world_size is not None:
            raise UsageError("--mesh and --world-size exclude each other", "the mesh defines the number of ranks")
        sizes = {name: _number(text, "--mesh") for name, text in parse_pairs(mesh.split(","), "--mesh").items()}
        total = 1
        for size in sizes.values():
            total *= size
        _require_ranks(total, most)
        return [(mesh, sizes, total)]
    found: dict[int, tuple[str, dict[str, int] | None, int]] = {}
    for text in (world_size if world_size is not None else ",".join(map(str, default))).split(","):
        size = _number(text.strip(), "--world-size")
        _require_ranks(size, most)
        found[size] = (f"{size} ranks", None, size)
    return list(found.values())


def parse_one_mesh(world_size: str | None, mesh: str | None) -> tuple[dict[str, int] | None, int | None]:
    """Parse --world-size and --mesh for one program: sizes of the mesh dims, and the number of ranks. Raises UsageError."""
    if world_size is None and mesh is None:
        return None, None
    found = parse_meshes(world_size, mesh, MOST_RANKS)
    if len(found) > 1:
        raise UsageError(f"--world-size {world_size} names {len(found)} sizes", "a program has one number of ranks")
    return found[0][1], found[0][2]


def parse_groups(values: Sequence[str]) -> dict[str, str | list[tuple[int, ...]]]:
    """Parse --group NAME=DIM and --group NAME=0,1;2,3. Raises UsageError."""
    found: dict[str, str | list[tuple[int, ...]]] = {}
    for name, text in parse_pairs(values, "--group").items():
        parts = [part.strip() for part in text.split(";") if part.strip()]
        lists = [[rank.strip() for rank in part.split(",")] for part in parts]
        if text.isidentifier():
            found[name] = text
        elif lists and all(rank.isascii() and rank.isdecimal() for ranks in lists for rank in ranks):
            found[name] = [tuple(map(int, ranks)) for ranks in lists]
        else:
            raise UsageError(f"--group {name}={text} names neither a mesh dim nor ranks", "write 3=tp, or 3=0,1;2,3")
    return found


def _number(text: str, where: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(
            f"{where}: '{text[:40]}' is not a number of ranks", "write --world-size 2,4 or --mesh dp=2,tp=2"
        )
    return int(text)


def _require_ranks(size: int, most: int) -> None:
    if size < 2:
        raise UsageError(
            f"a program needs at least 2 ranks, not {size}", "with fewer there are no collectives to verify"
        )
    if size > most:
        what = "a campaign draws programs for" if most == MAX_RANKS else "are run here"
        raise UsageError(f"{size} ranks are more than {what}", f"use at most {most} ranks")


def parse_seconds(text: str) -> float:
    """Parse a time: 90s, 30m, 8h, or a number of seconds. Raises UsageError."""
    units = {"s": 1, "m": 60, "h": 3600}
    number, unit = (text[:-1], text[-1]) if text[-1:] in units else (text, "s")
    try:
        found = float(number) * units[unit]
    except ValueError:
        found = 0.0
    if not 0 < found < 1e8:
        raise UsageError(f"--max-time {text} is not a time", "write 90s, 30m or 8h")
    return found


def read_known_findings(read: Path | None, write: Path | None) -> Baseline | None:
    """Read the known findings of --baseline, and of --write-baseline if that file exists. If both list a finding, the
    reason in the first one is used.

    Raises:
        UsageError: a file is missing, malformed or cannot be written.
    """
    found: list[KnownFinding] = []
    if read is not None:
        found += read_baseline(read).known
    if write is not None:
        if write.exists():
            found += read_baseline(write).known
        require_writable(write.parent, "choose another path for the baseline")
    if read is None and write is None:
        return None
    return Baseline(tuple({entry.key: entry for entry in reversed(found)}.values())[::-1])


def require_writable(directory: Path, hint: str) -> None:
    """Raise UsageError unless files can be written to a directory, which is created if missing."""
    probe = directory / ".writable"
    write_atomically(probe, "", hint)
    probe.unlink(missing_ok=True)
