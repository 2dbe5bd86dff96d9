"""`tcverify run` as a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from tcverify.application.loading import reference_of
from tcverify.cli import arguments
from tcverify.cli.running import MeshJob, RunResult, prepare_directories, run_campaigns
from tcverify.cli.settings import Settings, new_seed
from tcverify.registry.choices import DomainName, HostileName
from tcverify.workers import DrawPlan


def run(
    pass_: Any,
    *,
    world_size: int | Sequence[int] = (2, 3, 4),
    mesh: Mapping[str, int] | None = None,
    strategy: str | None = None,
    hostile: Sequence[HostileName] = (),
    max_examples: int = 200,
    max_time: float | None = None,
    seed: int | None = None,
    confirm: str = "gloo",
    domain: DomainName = "float64",
    checks: Sequence[str] | None = None,
    contract: Mapping[str, object] | None = None,
    pass_option: Mapping[str, str] | None = None,
    strict: bool = False,
    fail_fast: bool = False,
    search: bool = True,
    shrink_time: float = 30.0,
    pass_timeout: float = 20.0,
    report_dir: str | Path = "reports",
    console: Console | None = None,
) -> RunResult:
    """Verify a pass on generated programs, as `tcverify run` does, with the same defaults.

    Args:
        pass_: a built-in name, "module:attribute", "path/to/file.py:attribute", a pipeline "first+second", or a class, a
            function or an instance. A pass that can be imported by name runs in a worker process; any other, such as a function
            defined in a notebook, runs in this process, without protection from hangs.
        world_size: numbers of ranks; `mesh`: one mesh for all programs instead, e.g. {"dp": 2, "tp": 2}.
        strategy: names of strategies, separated by commas; None tries the pass on all, and takes those whose programs it changes
            most often.
        max_examples, max_time: number of programs, and seconds, per mesh.
        seed: of the programs; None draws one.
        contract: promises by name, which override what the pass declares.
        console: shows what `tcverify run` shows; None shows nothing.

    The other arguments are the options of `tcverify run`. Counterexamples are written to `report_dir`.

    Raises:
        UsageError: an argument is not valid.
        PassLoadError: the pass cannot be loaded.
    """
    target = pass_ if isinstance(pass_, str) else reference_of(pass_)
    if target is not None and isinstance(pass_, str):
        target = arguments.parse_target(pass_)
    name = pass_ if isinstance(pass_, str) else target
    sizes = [world_size] if isinstance(world_size, int) else list(world_size)
    text = ",".join(f"{dim}={size}" for dim, size in mesh.items()) if mesh is not None else None
    meshes = arguments.parse_meshes(None if mesh is not None else ",".join(map(str, sizes)), text)
    (drawn_from,) = arguments.parse_strategies(strategy, [name])
    settings = Settings(
        targets=[target or pass_],
        pass_option=dict(pass_option or {}),
        contract={name: str(value).lower() for name, value in (contract or {}).items()},
        confirm=confirm,
        pass_timeout=pass_timeout,
        report_dir=Path(report_dir),
        report=("html",),
        covered=[arguments.list_covered_modules(name)] if name is not None else None,
        search=search,
        strict=strict,
        max_examples=max_examples,
        max_time=max_time,
        seed=new_seed() if seed is None else seed,
        checks=checks,
        domain=domain,
        shrink_time=shrink_time,
        fail_fast=fail_fast,
    )
    console = console if console is not None else Console(file=StringIO())
    draws = arguments.list_option_draws(name, settings.pass_option) if name is not None else {}
    jobs = [
        MeshJob(name, size, drawings=[DrawPlan(drawn_from, size, dims, draws, tuple(hostile))])
        for name, dims, size in meshes
    ]
    prepare_directories(settings, console)
    return run_campaigns(settings, jobs, console)


__all__ = ["run"]
