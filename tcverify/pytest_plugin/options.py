"""Options of the plugin: the command line of pytest, then its ini file, then [tool.tcverify], then defaults."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tcverify.registry.choices import DOMAINS, DomainName, Word
from tcverify.system.configuration import configuration

CONFIRM = ("gloo", "cuda", "nccl", "none")  # and those that extensions register
PROFILES = ("dev", "ci", "nightly")

#: Where earlier failures and programs in flight are kept, from the root directory: a directory per item.
STATE_DIR = Path(".tcverify", "items")


#: Where every process of this environment looks for modules: as it was before pytest added directories of tests.
FRESH_PATH = tuple(sys.path)

#: Key of `FRESH_PATH` in what the controller of pytest-xdist tells its workers, which start with the directories of tests.
FRESH_PATH_KEY = "tcverify_fresh_path"


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asks for.

    Attributes:
        confirm: "gloo", "cuda", "nccl", "none" or the name of a registered executor.
        domain: "float64", "native" or "exact".
        profile: "dev", "ci" or "nightly".
        report_dir: where counterexamples are written, absolute.
        shown_dir: the same as commands name it, seen from where pytest was started.
        state_dir: where the state of items is kept, absolute.
        start_dir: where pytest was started.
        fresh_path: where every process of this environment looks for modules.
        seed: mixed into the seed of every item.
    """

    confirm: str
    domain: DomainName
    profile: str
    report_dir: Path
    shown_dir: Path
    state_dir: Path
    start_dir: Path
    fresh_path: tuple[str, ...]
    seed: int


def add_options(parser: pytest.Parser) -> None:
    """Declare the options and their ini forms."""
    group = parser.getgroup("tcverify", "verification of compiler passes (tcverify)")
    group.addoption(
        "--tcverify-confirm", metavar="{" + ",".join(CONFIRM) + "}", default=None,
        help="process group that runs the programs that lockstep does not refute [default: gloo]",
    )  # fmt: skip
    group.addoption(
        "--tcverify-domain", choices=DOMAINS, default=None,
        help="number domain that values are judged in [default: float64]",
    )  # fmt: skip
    group.addoption(
        "--tcverify-profile", choices=PROFILES, default=None,
        help="number of programs and of test items: dev, ci or nightly [default: dev]",
    )  # fmt: skip
    group.addoption(
        "--tcverify-report-dir", metavar="DIR", default=None, help="directory for counterexamples [default: reports]"
    )
    group.addoption(
        "--tcverify-seed", type=_seed, metavar="N", default=None,
        help="seed of the programs, e.g. another one every night [default: 0]",
    )  # fmt: skip
    parser.addini("tcverify_confirm", f"default of --tcverify-confirm: {', '.join(CONFIRM)}", default="")
    parser.addini("tcverify_domain", f"default of --tcverify-domain: {', '.join(DOMAINS)}", default="")
    parser.addini("tcverify_profile", f"default of --tcverify-profile: {', '.join(PROFILES)}", default="")
    parser.addini("tcverify_report_dir", "default of --tcverify-report-dir, relative to the root directory", default="")


def _seed(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError
    return number


def state_dir(config: pytest.Config) -> Path:
    """Return where the state of items is kept."""
    return config.rootpath / STATE_DIR


def report_dir(config: pytest.Config) -> Path:
    """Return where counterexamples are written, absolute.

    Raises:
        UsageError: pyproject.toml cannot be read.
    """
    given = config.getoption("tcverify_report_dir")
    if given:
        return Path(os.path.abspath(config.invocation_params.dir / given))
    table = configuration(config.rootpath / "pyproject.toml")
    default = config.getini("tcverify_report_dir") or str(table.get("report_dir", "reports"))
    return Path(os.path.abspath(config.rootpath / default))


def read_options(config: pytest.Config) -> Options:
    """Return the options of this run. Imports torch, and the extensions that [tool.tcverify] names.

    Raises:
        UsageError: an option, an ini file or [tool.tcverify] asks for what does not exist.
    """
    from tcverify.cli.arguments import load_configured_extensions, parse_names
    from tcverify.execution import EXECUTORS

    load_configured_extensions(config.rootpath / "pyproject.toml")
    table = configuration(config.rootpath / "pyproject.toml")

    def chosen(name: str, known: tuple[Word, ...], default: Word) -> Word:
        text = config.getoption(f"tcverify_{name}") or config.getini(f"tcverify_{name}") or table.get(name, default)
        return parse_names(str(text), known, name)[0]

    start = config.invocation_params.dir
    place = report_dir(config)
    return Options(
        confirm=chosen("confirm", (*EXECUTORS, "none"), "gloo"),
        domain=chosen("domain", DOMAINS, "float64"),
        profile=chosen("profile", PROFILES, "dev"),
        report_dir=place,
        shown_dir=_as_seen_from(start, place, config.rootpath),
        state_dir=state_dir(config),
        start_dir=start,
        fresh_path=tuple(getattr(config, "workerinput", {}).get(FRESH_PATH_KEY, FRESH_PATH)),
        seed=config.getoption("tcverify_seed") or 0,
    )


def _as_seen_from(start: Path, directory: Path, root: Path) -> Path:
    near = directory.is_relative_to(root) and start.is_relative_to(root)
    return Path(os.path.relpath(directory, start)) if near else directory
