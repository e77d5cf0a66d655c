"""What holds for every test run: the runner option, and a report of which tests did not run and why."""

import signal

import pytest
from hypothesis import HealthCheck, settings

from . import budget

_USUAL_EXAMPLES = 100


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--runner", choices=("v1", "v2"), default="v1", help="vLLM's model runner under test")
    about = "make up as many cases as a thorough run does; of tests of engines run those marked `long`, and no others"
    parser.addoption("--long", action="store_true", help=about)


def pytest_configure(config: pytest.Config) -> None:
    # Whatever a script starts in the background ignores Ctrl-C, and so would the commands that tests start from there.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("--long"):
        budget.be_thorough()
    # A deadline, and how long inputs take to make, would measure how busy the machine is.
    unhurried = settings(
        max_examples=budget.examples(_USUAL_EXAMPLES), deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
    settings.register_profile("unhurried", unhurried)
    settings.load_profile("unhurried")


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The text given to `pytest.skip`."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return "no reason given"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = terminalreporter.getreports("skipped")
    for report in skipped:
        terminalreporter.write_line(f"not run: {reason_of(report)} [{report.nodeid}]")
    passed = len(terminalreporter.getreports("passed"))
    failed = len(terminalreporter.getreports("failed")) + len(terminalreporter.getreports("error"))
    terminalreporter.write_line(f"summary: {passed} passed, {failed} failed, {len(skipped)} not run")
