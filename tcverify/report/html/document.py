"""report.html: one self-contained file that shows a counterexample. No network, no fonts, readable without scripts."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from tcverify.cases.counterexample import FILE_NAME, Counterexample
from tcverify.report.beside import FileReport
from tcverify.report.html.page import make_page
from tcverify.report.html.streams import BAR

REPORT_NAME = "report.html"


def to_html(case: Counterexample, path: Path | None) -> str:
    """Return the page of a counterexample. Foreign text is escaped, and the page allows only its own script.

    Args:
        path: its file, for the commands that reproduce it; None leaves them out.
    """
    page = make_page(case, path)
    styles = ["report.css", "streams.css"] if page.schedule is not None else ["report.css"]
    return render("report.html.j2", styles, page=page, bar=BAR)


def render(name: str, styles: Sequence[str] = ("report.css", "gallery.css"), **values: object) -> str:
    """Return a page made from a template, with its styles and the only script that it allows."""
    script = _asset("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    style = "\n".join(map(_asset, styles))
    return _template(name).render(style=style, script=script, digest=digest, **values)


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader("tcverify.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(name)


@cache
def _asset(name: str) -> str:
    return resources.files("tcverify.report.html").joinpath("templates", name).read_text(encoding="utf-8")


class HtmlReport(FileReport):
    """Writes report.html next to every counterexample; see `FileReport`."""

    name = REPORT_NAME
    announcement = "HTML report:  {}"

    def content(self, case: Counterexample) -> str:
        return to_html(case, self.report_dir / case.id / FILE_NAME)
