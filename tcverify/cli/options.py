"""Options that several commands share. Each is defined once, together with the code that reads it. Their names are
those of `Settings`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import click
from click.shell_completion import CompletionItem

from tcverify.cli import arguments
from tcverify.cli.importing import START_PROCESSES, begin_server
from tcverify.pytorch import PREFIX, SUBJECTS
from tcverify.registry.checks import CHECKS
from tcverify.registry.choices import CONDITIONS, DOMAINS, REPORTS
from tcverify.registry.executors import EXECUTORS
from tcverify.registry.extensions import load_extension
from tcverify.registry.op_laws import declare_op_law
from tcverify.registry.passes import BUILTIN
from tcverify.system.configuration import section

F = TypeVar("F", bound=Callable[..., Any])


def _together(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order in which help shows them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def completing(
    known: Callable[[], Iterable[str]], separator: str = ","
) -> Callable[[click.Context, click.Parameter, str], list[CompletionItem]]:
    """Shell completion of names, of the last one in a list; if none matches, the shell completes."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        before, between, last = incomplete.rpartition(separator)
        fitting = [CompletionItem(f"{before}{between}{name}") for name in known() if name.startswith(last)]
        return fitting or [CompletionItem(incomplete, type="file")]

    return complete


complete_passes = completing(lambda: (*BUILTIN, *(PREFIX + name for name in SUBJECTS)), "+")


def read_by(parse: Callable[[Any], Any], absent: Any = None) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that parses the value of an option; `absent` is the value without the option. Skipped during completion."""

    def read(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
        if context.resilient_parsing:
            return value
        return absent if value is None else parse(value)

    return read


def _executor(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """The name of an executor, including those that extensions register, or "none"."""
    known = [*EXECUTORS, "none"]
    if value not in known:
        raise click.BadParameter(f"{value!r} is not one of {', '.join(map(repr, known))}.", context, parameter)
    return value


def _load(context: click.Context, parameter: click.Parameter, references: tuple[str, ...]) -> None:
    """Load the extensions that the configuration names, and the given ones. Skipped during completion, which must be fast."""
    if context.resilient_parsing:
        return
    configured = Path("pyproject.toml")
    if context.info_name in START_PROCESSES and (references or "extension" in section(configured)):
        begin_server()  # most extensions import torch
    arguments.load_configured_extensions(configured)
    for reference in references:
        load_extension(reference)


def _declare(context: click.Context, parameter: click.Parameter, laws: tuple[str, ...]) -> None:
    for law in laws:
        declare_op_law(law)


def _checks(text: str) -> list[str] | None:
    if ":" in text:
        begin_server()  # it is a module of the user, and most of these import torch
    return arguments.parse_checks(text)


confirm = click.option(
    "--confirm", metavar="[gloo|cuda|nccl|none]", callback=_executor, default="gloo", show_default=True,
    shell_complete=completing(lambda: (*EXECUTORS, "none")),
    help="Process group that runs the programs that lockstep does not refute.",
)  # fmt: skip

domain = click.option(
    "--domain", type=click.Choice(DOMAINS), default="float64", show_default=True,
    help="Number domain: float64; exact also computes in a prime field, native in the program's own dtypes.",
)  # fmt: skip

bisect = click.option("--bisect", is_flag=True, help="Find the rewrites of the pass that cause a finding.")


def verification(*, pass_timeout: float, shrink_time: float) -> Callable[[F], F]:
    """What is checked, and how: the defaults take seconds."""
    return _together(
        click.option("--checks", default=None, callback=read_by(_checks), shell_complete=completing(lambda: CHECKS),
                     help=f"Checks to apply, any of {', '.join(CHECKS)}. [default: all]"),
        click.option("--contract", multiple=True, metavar="K=V",
                     callback=read_by(lambda values: arguments.parse_pairs(values, "--contract")),
                     help="Promise of the pass, e.g. idempotent=true; repeatable."),
        click.option("--pass-option", multiple=True, metavar="K=V",
                     callback=read_by(lambda values: arguments.parse_pairs(values, "--pass-option")),
                     help="Argument of the passes' constructors; repeatable."),
        click.option("--pass-timeout", type=click.FloatRange(0.1), default=pass_timeout, show_default=True,
                     help="Time limit for one application of a pass, in seconds."),
        click.option("--shrink-time", type=click.FloatRange(0), default=shrink_time, show_default=True,
                     help="Time limit for shrinking a finding, in seconds."),
        bisect,
    )  # fmt: skip


extension = click.option(
    "--extension", multiple=True, metavar="MODULE", is_eager=True, expose_value=False, callback=_load,
    help="Module or .py file that registers dialects, checks, strategies or executors; repeatable.",
)  # fmt: skip

op_law = click.option(
    "--op-law", multiple=True, metavar="OP=LAW", is_eager=True, expose_value=False, callback=_declare,
    help="Law of an op without a definition: my::op=rowwise(0), =pointwise or =linear.",
)  # fmt: skip

report_dir = click.option(
    "--report-dir", type=click.Path(path_type=Path), default=Path("reports"), show_default=True,
    help="Directory for counterexamples.",
)  # fmt: skip


strict = click.option(
    "--strict", is_flag=True, help="Hygiene findings, such as wrong metadata, refute a pass: --contract strict=true."
)


def fail_on(default: str | None) -> Callable[[F], F]:
    """What fails a run."""
    return click.option(
        "--fail-on", default=default,
        show_default=default or "any verdict but passed",
        callback=read_by(lambda text: arguments.parse_names(text, CONDITIONS, "condition"), absent=()),
        help="inconclusive: a single inconclusive program fails the run, too. refuted: only findings fail it, and with "
        "refuted,vacuity also a pass that nothing tested.",
    )  # fmt: skip


report = click.option(
    "--report", default="html", show_default=True, shell_complete=completing(lambda: REPORTS),
    callback=read_by(lambda text: arguments.parse_names(text, tuple(REPORTS), "report")),
    help=f"Reports to write, any of {', '.join(REPORTS)}.",
)  # fmt: skip


__all__ = [
    "bisect",
    "complete_passes",
    "completing",
    "confirm",
    "domain",
    "extension",
    "fail_on",
    "op_law",
    "read_by",
    "report",
    "report_dir",
    "strict",
    "verification",
]
