"""The pytest plugin: `verifies` makes a test function verify passes, one item per pass × world × shard.

pytest imports this in every run, whether or not a test uses it; so nothing here imports torch or Hypothesis before a test
that is decorated is collected.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from tcverify.errors import TcverifyError
from tcverify.pytest_plugin.decorator import ATTRIBUTE, verifies
from tcverify.pytest_plugin.failures import Failure, Inconclusive, NothingTested, NotVerified, Refuted
from tcverify.pytest_plugin.options import (
    FRESH_PATH,
    FRESH_PATH_KEY,
    Options,
    add_options,
    read_options,
    report_dir,
    state_dir,
)
from tcverify.pytest_plugin.summary import ATTRIBUTE as REPORT_ATTRIBUTE
from tcverify.pytest_plugin.summary import SummaryItem, write_summary
from tcverify.report.sanitize import error_text

if TYPE_CHECKING:
    from _pytest.terminal import TerminalReporter

    from tcverify.pytest_plugin.session import Session

#: The argument of test functions that takes the outcome.
ARGUMENT = "verdict"

_OPTIONS = pytest.StashKey[Options]()
_SESSION = pytest.StashKey["Session"]()
_ITEM = pytest.StashKey[SummaryItem]()
_INTERRUPTED = pytest.StashKey[list[SummaryItem]]()
_EARLIER = pytest.StashKey[dict[str, tuple[int, int]]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Declare the mark that items carry, and forget earlier failures when pytest is told to forget what it knows."""
    config.addinivalue_line("markers", "tcverify: verifies a compiler pass (set by tcverify.verifies)")
    # pytest sets aside the filter that `import tcverify` makes.
    config.addinivalue_line("filterwarnings", "ignore:Failed to initialize NumPy:UserWarning")
    config.stash[_INTERRUPTED] = []
    if config.getoption("cacheclear", False) and not hasattr(config, "workerinput"):
        for failures in state_dir(config).glob("*/failures"):
            shutil.rmtree(failures, ignore_errors=True)


# -------------------------------------------------------------------------------------------------------- collecting


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make an item of each case."""
    if getattr(metafunc.cls, ATTRIBUTE, None) is not None:
        _refuse(metafunc, "verifies decorates a class", "decorate its test functions")
    asked = getattr(metafunc.function, ATTRIBUTE, None)
    if asked is None:
        return
    if not asked:
        _refuse(metafunc, "verifies is used without parentheses", "write @tcverify.verifies(MyPass)")
    if len(asked) > 1:
        _refuse(metafunc, "verifies decorates one function twice", "name all passes in one verifies")
    if inspect.iscoroutinefunction(metafunc.function):
        _refuse(metafunc, "verifies decorates an async function", "make it an ordinary one")
    from tcverify.pytest_plugin.cases import make_cases

    try:
        cases = make_cases(asked[0], _options(metafunc.config))
    except TcverifyError as error:
        _refuse(metafunc, error.message, error.hint)
    if ARGUMENT not in metafunc.fixturenames:
        metafunc.fixturenames.append(ARGUMENT)  # a test function need not take it
    metafunc.parametrize(ARGUMENT, [pytest.param(case, id=case.id, marks=pytest.mark.tcverify) for case in cases])


def _refuse(metafunc: pytest.Metafunc, message: str, hint: str | None) -> NoReturn:
    """Make the collection fail, with a text and no traceback."""
    where = f"{metafunc.definition.nodeid}: "
    raise pytest.fail.Exception(where + error_text(TcverifyError(message, hint)), pytrace=False) from None


def _options(config: pytest.Config) -> Options:
    if _OPTIONS not in config.stash:
        config.stash[_OPTIONS] = read_options(config)
    return config.stash[_OPTIONS]


def _session(config: pytest.Config) -> Session:
    from tcverify.pytest_plugin.session import Session

    if _SESSION not in config.stash:
        config.stash[_SESSION] = Session()
        config.add_cleanup(config.stash[_SESSION].close)  # pytest does so however the run ends, Ctrl-C included
    return config.stash[_SESSION]


# ----------------------------------------------------------------------------------------------------------- running


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Run the campaign of an item; when it has passed, pytest goes on to call the function with the outcome."""
    if getattr(pyfuncitem.function, ATTRIBUTE, None) is None:
        return
    from tcverify.pytest_plugin.running import require_passed, run_case

    config = pyfuncitem.config
    case: Any = pyfuncitem.callspec.params[ARGUMENT]
    outcome, item = run_case(case, pyfuncitem.nodeid, _options(config), _session(config))
    if outcome.finished.stop == "interrupted":
        config.stash[_INTERRUPTED].append(item)
        raise KeyboardInterrupt
    pyfuncitem.stash[_ITEM] = item
    others = [entry for entry in pyfuncitem.user_properties if not entry[0].startswith("tcverify_")]  # of a first try
    pyfuncitem.user_properties[:] = [*others, *item.properties()]
    require_passed(case, outcome, item, _options(config))
    pyfuncitem.funcargs[ARGUMENT] = outcome


@pytest.hookimpl(hookwrapper=True)  # the form that old versions of pytest know too
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    """Let reports carry the summary; show failures of ours as text alone, at the place of the test."""
    result = yield
    report: pytest.TestReport = result.get_result()
    if call.when == "call" and _ITEM in item.stash:
        setattr(report, REPORT_ATTRIBUTE, item.stash[_ITEM].to_data())
    if call.excinfo is not None and isinstance(call.excinfo.value, Failure):
        shown = call.excinfo.getrepr(style="value", chain=False)
        if shown.reprcrash is not None:
            path, line, _ = item.location
            shown.reprcrash.path, shown.reprcrash.lineno = path, (line or 0) + 1
            shown.reprcrash.message = call.excinfo.value.headline
        report.longrepr = shown


# ----------------------------------------------------------------------------------------------------------- the end


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker of pytest-xdist where others look for modules; note which cases there are before any of them runs."""
    node.workerinput[FRESH_PATH_KEY] = list(FRESH_PATH)
    if _EARLIER not in node.config.stash:
        with contextlib.suppress(TcverifyError):  # as the collection will say
            node.config.stash[_EARLIER] = dict(_kept(node.config))


def pytest_terminal_summary(
    terminalreporter: TerminalReporter, exitstatus: pytest.ExitCode, config: pytest.Config
) -> None:
    """Say what the campaigns came to."""
    reports = [
        report
        for category in terminalreporter.stats.values()
        for report in category
        if isinstance(report, pytest.TestReport) and hasattr(report, REPORT_ATTRIBUTE)
    ]
    items = [SummaryItem.from_data(getattr(report, REPORT_ATTRIBUTE)) for report in reports] + config.stash[
        _INTERRUPTED
    ]
    failed = {report.nodeid for report in reports if report.failed}
    notes: list[str] = []
    with contextlib.suppress(TcverifyError):  # options that make no sense, as the collection has said
        notes += _recovered(config)
        if exitstatus == pytest.ExitCode.INTERRUPTED:
            notes += _found_by_workers(config, {case.id for item in items for case in item.cases})
    write_summary(terminalreporter, items, failed, notes, brief=terminalreporter.verbosity < 0)


def _recovered(config: pytest.Config) -> Iterator[str]:
    """Keep the programs on which processes of this run, or an earlier one, died."""
    directories = {path.parent for path in state_dir(config).glob("*/in-flight-*.json")}
    if directories:
        from tcverify.campaign import recover_in_flight

        for directory in sorted(directories):
            for path in recover_in_flight(directory, _options(config).report_dir):
                yield f"a run died while verifying a program, which is saved as {path}"
                yield f"  show it with: tcverify show {path}; run it again with: tcverify replay {path}"


def _found_by_workers(config: pytest.Config, known: set[str]) -> Iterator[str]:
    """What workers of pytest-xdist wrote down before an interrupt: they cannot tell any more."""
    if _EARLIER in config.stash:
        for path, version in _kept(config):
            case = os.path.basename(os.path.dirname(path))
            if case not in known and config.stash[_EARLIER].get(path) != version:
                yield f"{case} was found before the interrupt and is saved as {path}"


def _kept(config: pytest.Config) -> Iterator[tuple[str, tuple[int, int]]]:
    """The files of counterexamples that there are, each with what changes when it is written again, whatever the clock says."""
    for path in sorted(report_dir(config).glob("*/counterexample.json")):
        with contextlib.suppress(OSError):
            found = path.stat()
            yield str(path), (found.st_ino, found.st_mtime_ns)


__all__ = ["Failure", "Inconclusive", "NotVerified", "NothingTested", "Refuted", "verifies"]
