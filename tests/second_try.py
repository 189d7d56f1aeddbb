"""A test that failed gets a second try at once; the run's last line names it, and what failed the first time is kept.

Real processes on a busy machine can be late. A test that is named there is a fault to be found, in the test or in the code.
"""

from __future__ import annotations

from typing import Any

import pytest
from _pytest.runner import runtestprotocol

AGAIN = "again"
"""The outcome of reports of a first try that failed."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--second-try", action="store_true", help="try a test that failed once more")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> object:
    if not item.config.getoption("--second-try"):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if any(report.failed for report in reports):
        for report in reports:
            if report.failed:
                report.outcome = AGAIN  # type: ignore[assignment]
                item.ihook.pytest_runtest_logreport(report=report)
        _forget(item)
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
    for report in reports:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _forget(item: Any) -> None:
    """Fixtures that raised are made anew by the second try."""
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            if definition.cached_result is not None and definition.cached_result[2] is not None:
                definition.cached_result = None
    item._initrequest()


def pytest_report_teststatus(report: Any) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
    if report.outcome == AGAIN:
        return AGAIN, "R", ("AGAIN", {"yellow": True})
    return None


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for report in terminalreporter.stats.get(AGAIN, ()):
        terminalreporter.write_sep("_", f"first try of {report.nodeid} ({report.when})")
        terminalreporter.write_line(str(report.longreprtext))


def pytest_unconfigure(config: pytest.Config) -> None:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not config.getoption("--second-try") or hasattr(config, "workerinput"):
        return
    names = sorted({report.nodeid for report in reporter.stats.get(AGAIN, ())})
    reporter.write_line(f"second try: {', '.join(names) or 'no test needed one'}")
