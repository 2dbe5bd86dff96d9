"""The page of a counterexample in a real browser: what it shows, by pointer and by keyboard, with and without scripts.

`TCVERIFY_UPDATE_SNAPSHOTS=1 pytest -m browser tests/browser` writes the snapshots anew; look at them before you keep them.
"""

from __future__ import annotations

import os
import struct
import tempfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tcverify.cases.counterexample import Counterexample, write_counterexample
from tcverify.report.html import to_gallery, to_html
from tcverify.report.html.kernels import to_kernel_page
from tests.browser.chromium import NAMES, Browser, browser, find_chromium
from tests.report.test_html import hostile_case
from tests.report.test_kernels import finished, kernel, leaves_alone
from tests.support.html_cases import blocks, case, drops_middle_reduction, widens
from tests.support.schedule_cases import schedule_case

pytestmark = pytest.mark.browser

SNAPSHOTS = Path(__file__).parent / "snapshots"
BLAMED = ".panel:last-child .flagged"
FOCUSED = "document.activeElement.id"
PATHS = "[...document.querySelectorAll('.edge:not(.away)')].map(e => e.getAttribute('d')).join(' ')"
PLACES = (
    "[...document.querySelectorAll('.box:not(.away), .fold, .panel')].map(e => e.getAttribute('transform')).join(' ')"
)
CASES = [
    ("wrong-value", 9),
    ("deadlock", 1),
    ("rewritten-raises", 1),
    ("pass-raised", 1),
    ("race", 3),
    ("wrong-schedule", 2),
]


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    program = find_chromium()
    if program is None:
        pytest.skip(f"no Chromium found: none of {', '.join(NAMES)} is on the path")
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
        browser(program, Path(profile)) as running,
    ):
        yield running


def counterexample(kind: str, number: int) -> Counterexample:
    return schedule_case(kind, number) if kind in ("race", "wrong-schedule") else case(kind, number)


def show(
    page: Browser, found: Counterexample, folder: Path, width: int = 1400, *, dark: bool = False, scripts: bool = True
) -> None:
    """Show a case and insist that the browser has nothing to complain about."""
    path = write_counterexample(found, folder)
    file = folder / "page.html"
    file.write_text(to_html(found, path))
    page.open(file, width, dark=dark, scripts=scripts)
    assert page.complaints == []


def text(page: Browser, selector: str = "body") -> str:
    found: str = page.value(f"document.querySelector('{selector}').innerText")
    return found


# ------------------------------------------------------------------------------------------------------------ as a whole


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_nothing_is_wider_than_the_window(page: Browser, kind: str, number: int, tmp_path: Path) -> None:
    show(page, counterexample(kind, number), tmp_path)
    assert len(set(_pixels(page.picture()))) > 40
    for width in (800, 1000, 1160, 1600):
        page.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert page.value("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("dark", [False, True])
def test_text_stands_out_from_what_is_behind_it(page: Browser, dark: bool, tmp_path: Path) -> None:
    show(page, counterexample("race", 3), tmp_path, dark=dark)
    faint = page.value(_FAINT)
    assert faint == []
    show(page, counterexample("wrong-value", 9), tmp_path, dark=dark)
    page.press("Tab")
    page.click("a.jump")
    assert page.value(_FAINT) == []


@pytest.mark.parametrize(("kind", "number"), [("wrong-value", 9), ("deadlock", 1), ("race", 3)])
def test_it_is_built_as_it_was(page: Browser, kind: str, number: int, tmp_path: Path) -> None:
    show(page, counterexample(kind, number), tmp_path)
    closed = page.value(_OUTLINE)
    if page.value("document.querySelector('.fold')") is not None:
        page.click(".fold")
        opened = [line for line in page.value(_OUTLINE) if line.startswith("g ")]
        closed += ["", "with the first fold open:", "", *opened]
    snapshot(f"{kind}.txt", "\n".join(closed) + "\n")


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_it_says_the_essentials_without_scripts(page: Browser, kind: str, number: int, tmp_path: Path) -> None:
    found = counterexample(kind, number)
    show(page, found, tmp_path, scripts=False)
    said = text(page)
    assert found.finding.title in said
    assert "tcverify replay" in said
    assert "Open all folds" not in said
    if kind == "wrong-value":
        assert "elements differ, most at" in text(page, ".inspector")
        assert "… 17 unchanged nodes …" in " ".join(page.value(_SVG_TEXTS))


# ------------------------------------------------------------------------------------------------------------ the drawing


def test_the_link_leads_to_the_first_bad_node(page: Browser, tmp_path: Path) -> None:
    show(page, case("wrong-value", 9), tmp_path)
    page.click("a.jump")
    id = page.value(f"document.querySelector('{BLAMED}').id")
    assert page.value(FOCUSED) == id
    seen = page.value(f"document.getElementById('{id}').getBoundingClientRect().toJSON()")
    assert 0 < seen["top"] < seen["bottom"] < 1000
    assert "change 2 of 2" in text(page, ".tools")


def test_the_link_leads_there_without_scripts(page: Browser, tmp_path: Path) -> None:
    show(page, case("wrong-value", 9), tmp_path, scripts=False)
    page.click("a.jump")
    assert page.value("document.querySelector(':target').getAttribute('class')").endswith("flagged")


def test_a_node_that_is_clicked_tells_everything_until_escape(page: Browser, tmp_path: Path) -> None:
    show(page, case("wrong-value", 3), tmp_path)
    page.click("#pa5")
    said = text(page, ".chosen")
    for part in (
        "rms_norm(add, gain, 1e-06)",
        "float32[4, 8]",
        "equal to the original's 'rms_norm'",
        "ranks 0, 1 equal",
    ):
        assert part in said
    assert page.value("document.querySelectorAll('.chosen .tensor td').length") == 32
    page.press("Escape")
    assert page.value("document.querySelector('.chosen').hidden")
    assert "add_1" in text(page, ".start")


def test_values_are_told_alike_by_script_and_template(page: Browser, tmp_path: Path) -> None:
    show(page, case("wrong-value", 3), tmp_path)
    written = page.value("document.querySelector('.start .values').outerHTML")
    page.click("a.jump")
    built = page.value("document.querySelector('.chosen .values').outerHTML")
    assert "".join(built.split()) == "".join(written.split()).replace('<spanclass="">', "<span>")


def test_pointing_at_a_node_shows_it_for_as_long(page: Browser, tmp_path: Path) -> None:
    show(page, case("wrong-value", 3), tmp_path)
    page.hover("#pa5")
    assert "rms_norm" in text(page, ".chosen")
    assert page.value("document.querySelectorAll('.edge.lit').length") == 3
    page.hover("h1")
    assert page.value("document.querySelector('.chosen').hidden")
    assert page.value("document.querySelectorAll('.lit').length") == 0


def test_folds_open_and_close_again(page: Browser, tmp_path: Path) -> None:
    show(page, case("wrong-value", 9), tmp_path)
    closed = page.value(PATHS), page.value(PLACES)
    hidden = page.value("document.querySelectorAll('.box.away').length")
    page.click(".fold")
    assert 0 < page.value("document.querySelectorAll('.box.away').length") < hidden
    assert page.value("document.querySelector('.fold').getAttribute('aria-expanded')") == "true"
    page.press("Enter")
    assert (page.value(PATHS), page.value(PLACES)) == closed
    page.click("[data-do=folds]")
    assert page.value("document.querySelectorAll('.box.away').length") == 0
    assert page.value(_OVERLAPS) == []
    page.click("[data-do=folds]")
    assert (page.value(PATHS), page.value(PLACES)) == closed


def test_the_script_arranges_as_the_page_was_written(page: Browser, tmp_path: Path) -> None:
    for found in (case("wrong-value", 9), case("deadlock"), schedule_case("race", 3)):
        show(page, found, tmp_path, scripts=False)
        written = page.value(PATHS), page.value(PLACES)
        show(page, found, tmp_path)
        assert (page.value(PATHS), page.value(PLACES)) == written


def test_the_graph_is_walked_by_keyboard(page: Browser, tmp_path: Path) -> None:
    show(page, case("wrong-value", 9), tmp_path)
    page.value(f"document.querySelector('{BLAMED}').focus()")
    blamed = page.value(FOCUSED)
    assert page.value("document.querySelectorAll('.stage [tabindex=\"0\"].box').length") == 1
    page.press("ArrowUp")
    operand = page.value(FOCUSED)
    assert operand != blamed
    assert "silu_3" in text(page, ".chosen h3")
    page.press("ArrowDown")
    assert page.value(FOCUSED) == blamed
    page.press("ArrowLeft")
    assert page.value(FOCUSED) == blamed.replace("pa", "pb")
    page.press("p")
    assert "all_reduce_4" in text(page, ".chosen h3")
    page.press("f")
    assert page.value(FOCUSED) == blamed
    page.press("Enter")
    assert page.value("document.activeElement.className").startswith("inspector")
    page.press("Escape")
    assert page.value(FOCUSED) == blamed
    page.press("ArrowDown", "ArrowDown", "ArrowDown")
    assert page.value("document.activeElement.getAttribute('class')") == "fold"
    outline = "getComputedStyle(document.activeElement.querySelector('.frame')).strokeWidth"
    assert page.value(outline) == "3px"


def test_nodes_are_found_by_name_inside_folds(page: Browser, tmp_path: Path) -> None:
    show(page, case("wrong-value", 9), tmp_path)
    page.click("input[type=search]")
    page.press(*"silu_8")
    assert text(page, ".chosen h3").strip() == "silu_8"
    assert page.value("document.querySelectorAll('.box.lit.away').length") == 0
    page.press("x")
    assert page.value("document.activeElement.getAttribute('aria-invalid')") == "true"


def test_names_elsewhere_on_the_page_lead_to_their_nodes(page: Browser, tmp_path: Path) -> None:
    show(page, schedule_case("race", 3), tmp_path)
    for selector in (".streams .bar.marked", ".timeline .node button", "#values ~ details code button"):
        page.value("for (const d of document.querySelectorAll('details')) d.open = true")
        name = page.value(f"document.querySelector('{selector}').closest('[data-go]').dataset.go.slice(2)")
        page.click(selector)
        assert page.value(f"known.nodes[{FOCUSED}].n") == name


def test_commands_can_be_copied(page: Browser, tmp_path: Path) -> None:
    found = case("rewritten-raises")
    found = replace(found, facts=replace(found.facts, target="mine.py:Pass"))
    show(page, found, tmp_path)
    page.click(".copy button")
    said = "new Promise(done => setTimeout(() => done(document.querySelector('.copy button').textContent), 200))"
    assert page.value(said) in ("Copied", "Press Ctrl+C")
    assert page.complaints == []


# ------------------------------------------------------------------------------------------------- paper, and what is hostile


def test_on_paper_nothing_waits_to_be_clicked(page: Browser, tmp_path: Path) -> None:
    show(page, case("wrong-value", 9), tmp_path)
    page.click("#" + page.value(f"document.querySelector('{BLAMED}').id"))
    assert page.paper().startswith(b"%PDF-")
    page.call("Emulation.setDeviceMetricsOverride", width=720, height=1000, deviceScaleFactor=1, mobile=False)
    page.call("Emulation.setEmulatedMedia", media="print")
    for selector in ("nav", ".tools", ".copy button", ".chosen"):
        assert page.value(f"getComputedStyle(document.querySelector('{selector}')).display") == "none"
    assert "elements differ, most at" in text(page, ".start")
    assert page.value("getComputedStyle(document.querySelector('.inspector')).position") == "static"
    assert page.value("document.querySelector('.drawing').getBoundingClientRect().right") <= 720


def test_nothing_of_others_acts(page: Browser, tmp_path: Path) -> None:
    show(page, hostile_case(), tmp_path)
    page.click("#pb1")
    assert "</script></style><img src=x onerror=alert(1)>" in text(page)
    assert page.value("document.images.length") == 0
    assert page.complaints == []


def test_the_exhibition_shows_every_case(page: Browser, tmp_path: Path) -> None:
    found = [counterexample(kind, number) for kind, number in CASES]
    paths = sorted(write_counterexample(one, tmp_path) for one in found)
    file = tmp_path / "index.html"
    file.write_text(to_gallery(paths, tmp_path))
    for width in (800, 1400):
        page.open(file, width)
        assert page.complaints == []
        assert page.value("document.documentElement.scrollWidth") <= width
    assert page.value("document.querySelectorAll('.exhibit').length") == len(found)
    assert page.value("document.querySelectorAll('.exhibit .drawing').length") == len(found)


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_kernels_is_read_at_any_width(page: Browser, dark: bool, tmp_path: Path) -> None:
    found = [kernel(*one) for one in ((drops_middle_reduction, blocks(1)), (drops_middle_reduction, blocks(2)),
                                      (widens, blocks(1)), (leaves_alone, blocks(1)))]  # fmt: skip
    file = tmp_path / "kernels.html"
    file.write_text(to_kernel_page([finished(*found)]))
    for width in (800, 1400):
        page.open(file, width, dark=dark)
        page.value("for (const d of document.querySelectorAll('details')) d.open = true")
        assert page.complaints == []
        assert page.value("document.documentElement.scrollWidth") <= width
        assert page.value(_FAINT) == []
    assert page.value("document.querySelectorAll('.exhibit .drawing').length") == 3


def snapshot(name: str, said: str) -> None:
    """Compare a text with tests/browser/snapshots/NAME."""
    path = SNAPSHOTS / name
    if os.environ.get("TCVERIFY_UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(said)
    assert said == path.read_text()


def _pixels(png: bytes) -> bytes:
    """The filtered bytes of a PNG: few different ones when it is blank."""
    data, at = b"", 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += length + 12
    return zlib.decompress(data)


_SVG_TEXTS = "[...document.querySelectorAll('.drawing text')].map(e => e.textContent)"

#: Headings, what can be reached by Tab, and the drawings: what is in sight, and where; not what is said of values.
_OUTLINE = """
(() => {
  const found = [], kinds = 'h1, h2, h3, nav, section, aside, a, button, input, summary, [tabindex="0"], .panel, .box, .fold';
  const name = (e) => e.getAttribute('aria-label') || (e.matches('section, aside, nav, pre') ? '' : e.textContent);
  for (const e of document.querySelectorAll(kinds)) {
    const closed = e.closest('details:not([open])');
    if (!e.checkVisibility() || e.matches('.away') || (closed && !e.matches('summary'))) continue;
    const role = e.getAttribute('role'), place = e.getAttribute('transform');
    const parts = [e.tagName.toLowerCase(), role && `(${role})`, ...[...e.classList].map(c => `.${c}`)];
    if (e.tabIndex === 0) parts.push('by Tab');
    if (place) parts.push(`at ${place.replace('translate', '')}`);
    const words = [...e.querySelectorAll(':scope > text:not(.note)')].map(t => t.textContent).join(' | ');
    parts.push(words || name(e).replace(/\\s+/g, ' ').trim().slice(0, 60));
    found.push(parts.filter(Boolean).join(' '));
  }
  return found;
})()
"""

#: Boxes in sight that cover each other.
_OVERLAPS = """
(() => {
  const found = [], boxes = [...document.querySelectorAll('.box:not(.away) > .frame, .fold > .frame')];
  const places = boxes.map(b => b.getBoundingClientRect());
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const a = places[i], b = places[j];
    if (a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1) {
      found.push(boxes[i].parentNode.id + ' covers ' + boxes[j].parentNode.id);
    }
  }
  return found;
})()
"""

#: Texts of HTML whose contrast to what is behind them is below 4.5, as WCAG 2 reckons it.
_FAINT = """
(() => {
  const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = numbers(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = new Set();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || element.closest('svg, script, .sr') || !element.getClientRects().length) continue;
    const [a, b] = [light(numbers(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 4.5) found.add(element.outerHTML.slice(0, 80));
  }
  return [...found];
})()
"""
