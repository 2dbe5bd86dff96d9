"""Every error of tcverify, with one common base class.

A finding about a pass is data (`tcverify.program.finding.Finding`), never an exception. Exceptions report mistakes of the user
and failures of the machine: what is wrong, where, and how to fix it.
"""

from __future__ import annotations


class TcverifyError(Exception):
    """Base class of all errors that tcverify raises on purpose.

    Args:
        message: what is wrong and where.
        hint: how to fix it, in one sentence.
    """

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}" if self.hint else self.message


class UsageError(TcverifyError):
    """The command line or the configuration names something that does not exist, or asks for something impossible."""


class ProgramError(TcverifyError):
    """A program is malformed: its file, its mesh, its inputs or its graph."""


class PassLoadError(TcverifyError):
    """A pass cannot be found, imported or called as a pass."""


class Unsupported(TcverifyError):
    """Raised by a pass to decline a program: the program is skipped and counted, not refuted."""


class UnsupportedOp(TcverifyError):
    """An op has no meaning in the dialect tables. The verdict is inconclusive and names the op."""

    def __init__(self, op: str, reason: str) -> None:
        super().__init__(f"op {op} is not supported: {reason}")
        self.op = op
        self.reason = reason


class ExecutorError(TcverifyError):
    """An executor could not run a program (a rank died, a process group timed out). This alone is never a finding."""


class InternalError(TcverifyError):
    """An invariant of tcverify itself is violated."""

    def __init__(self, message: str) -> None:
        super().__init__(
            f"internal error: {message}",
            "this should never happen; please report it with the command and the program file",
        )
