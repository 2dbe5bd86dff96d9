"""The command line: the group of commands, which are imported on demand, and the handling of errors.

Versions, help, completions and errors in options do not need torch, so they do not import it.
"""

from __future__ import annotations

import errno
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import click

from tcverify import __version__
from tcverify.cli.settings import FAILED, INTERNAL, INTERRUPTED, UNUSABLE
from tcverify.errors import InternalError, TcverifyError, UsageError
from tcverify.registry.registry import Registry
from tcverify.report.sanitize import error_text
from tcverify.system.configuration import configuration

#: The commands; the module of each defines its options and its action.
COMMANDS: Registry[click.Command] = Registry(
    {
        "run": "tcverify.cli.commands.run:run",
        "check": "tcverify.cli.commands.check:check",
        "worker": "tcverify.cli.commands.worker:worker",
        "replay": "tcverify.cli.commands.replay:replay",
        "show": "tcverify.cli.commands.show:show",
        "init": "tcverify.cli.commands.init:init",
        "explain": "tcverify.cli.commands.explain:explain",
        "passes": "tcverify.cli.commands.passes:passes",
        "doctor": "tcverify.cli.commands.doctor:doctor",
    }
)

#: Commands whose options [tool.tcverify] sets. They share one table; each takes the options that it has.
_CONFIGURED = ("run", "check")

#: Errors of the system when a file cannot be written any more.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def _silence() -> None:
    """Keep the interpreter from reporting at exit that standard output is closed: we have reported it already."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Group(click.Group):
    """Turns an error into a message and an exit code."""

    def invoke(self, context: click.Context) -> Any:
        debug = context.params.get("debug", False)
        try:
            return super().invoke(context)
        except (click.exceptions.Exit, click.ClickException, click.Abort):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            context.exit(INTERRUPTED)
        except BrokenPipeError:
            _silence()  # the reader of our output is gone (`tcverify run | head`)
            context.exit(FAILED)
        except TcverifyError as error:
            if debug:
                traceback.print_exc()
            click.echo(error_text(error), err=True)
            context.exit(INTERNAL if isinstance(error, InternalError) else UNUSABLE)
        except Exception as error:  # noqa: BLE001 - the last resort: no traceback without --debug
            if debug:
                traceback.print_exc()
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                where = f"{error.filename}: " if error.filename else ""
                click.echo(
                    error_text(UsageError(f"{where}{error.strerror}", "free disk space and run again")), err=True
                )
                context.exit(UNUSABLE)
            click.echo(error_text(InternalError(f"{type(error).__name__}: {error}")), err=True)
            click.echo("  run again with `tcverify --debug …` for the traceback", err=True)
            context.exit(INTERNAL)


@click.group(cls=_Group, commands=COMMANDS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="tcverify")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Verify compiler passes that rewrite graphs with collectives.

    Exit codes: 0 passed, 1 refuted, inconclusive or nothing tested, 2 unusable input, 3 internal error, 130 interrupted.

    `tcverify explain TERM` explains the terms of the output.
    """
    if context.invoked_subcommand in _CONFIGURED:
        known = {name: _options(COMMANDS[name]) for name in _CONFIGURED}
        said = configuration(Path("pyproject.toml"), sorted(set().union(*known.values())))
        own = known[context.invoked_subcommand]
        context.default_map = {context.invoked_subcommand: {name: v for name, v in said.items() if name in own}}


def _options(command: click.Command) -> set[str]:
    """Names of the options of a command that a configuration file may set."""
    apart = ("sources", "extension", "op_law", "save")
    return {param.name for param in command.params if param.name is not None and param.name not in apart}


if __name__ == "__main__":
    main()
