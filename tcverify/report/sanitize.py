"""Makes foreign text harmless: what a pass prints must not control the terminal that shows it."""

from __future__ import annotations

import textwrap
import unicodedata

from tcverify.errors import TcverifyError

#: Longest line that is shown; files contain the rest.
MAX_LINE = 1000

#: Categories of characters that terminals act upon or that change how their neighbours are shown: control, format (among
#: them those that reverse the direction of writing), surrogate, line and paragraph separator.
_ACTIVE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def sanitize(text: str) -> str:
    """Return one line of text in which control characters, escape sequences and line ends are spelled out."""
    shown = text.replace("\t", "    ") if len(text) <= MAX_LINE else f"{text[:MAX_LINE]} …"
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in _ACTIVE else c for c in shown)


def sanitize_lines(text: str) -> list[str]:
    """Return the lines of a text, each as `sanitize` makes it."""
    return [sanitize(line) for line in text.rstrip().split("\n")] if text.strip() else []


def plural(number: int, noun: str) -> str:
    """ "1 node", "2 nodes"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def wrap(text: str, width: int) -> list[str]:
    """Break one line at blanks so that it fits; what follows is indented below it. Long words stay whole."""
    if len(text) <= width:
        return [text]
    indent = " " * min(len(text) - len(text.lstrip()) + 4, width // 2)
    return textwrap.wrap(
        text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    ) or [text]


def one_line(error: Exception) -> str:
    """Return the kind of an error and the first line of its message, as part of a sentence."""
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


def error_text(error: TcverifyError) -> str:
    """Return an error as text: what is wrong and, indented below, how to fix it."""
    lines = [f"Error: {error.message}", *([f"hint: {error.hint}"] if error.hint else [])]
    first, *rest = [line for text in lines for line in sanitize_lines(text)]
    return "\n".join([first, *(f"  {line}" for line in rest)])
