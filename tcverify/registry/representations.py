"""Representations of a verdict for people: imported when a verdict is printed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tcverify.registry.registry import Registry

#: By format, a function that returns a `Verdict` as "text" for a terminal, or as "html" for a notebook.
REPRESENTATIONS: Registry[Callable[[Any], str]] = Registry(
    {"text": "tcverify.report.verdict:verdict_text", "html": "tcverify.report.verdict:verdict_html"}
)

__all__ = ["REPRESENTATIONS"]
