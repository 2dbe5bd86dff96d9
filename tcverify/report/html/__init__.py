"""Pages: report.html of one counterexample (`page`, `document`), and the exhibition of several (`gallery`)."""

from tcverify.report.html.document import HtmlReport, to_html
from tcverify.report.html.gallery import to_gallery

__all__ = ["HtmlReport", "to_gallery", "to_html"]
