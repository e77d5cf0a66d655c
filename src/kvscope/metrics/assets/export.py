"""All generated files together, and whether the files in a folder are what this version would generate."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from .dashboard import DASHBOARD_FILE, dashboard_file
from .pages import LANGUAGES, SUFFIX, dictionary, runbook
from .recording import recording_rules
from .rules import ALERT_FILE, RECORDING_FILE, TEST_FILE, alert_file, alert_test_file, recording_file
from .series import problems_in

PAGES = ".."
"""Where the rule files find the pages, unless the user says at which address they publish them."""


class Difference(msgspec.Struct, frozen=True):
    """A file that is not as this version makes it: ``missing`` or ``stale``. ``unknown`` are the series that it names
    and that no process of this version can emit.
    """

    name: str
    what: str
    unknown: tuple[str, ...] = ()


def assets(prefix: str, *, pages: str = PAGES) -> dict[str, str]:
    """File name, relative to the folder, -> text, of everything that is made from the catalog.

    ``prefix`` is that of ``kv_monitor.prefix``, ``pages`` the address at which the pages are published.

    Raises:
        ValueError: something would name a series that no process of this version can emit.
    """
    files = {
        f"grafana/{DASHBOARD_FILE}": dashboard_file(prefix),
        f"prometheus/{RECORDING_FILE}": recording_file(prefix),
        f"prometheus/{ALERT_FILE}": alert_file(prefix, pages),
        f"prometheus/{TEST_FILE}": alert_test_file(prefix, pages),
    }
    for language in LANGUAGES:
        files[f"metrics{SUFFIX[language]}"] = dictionary(language, prefix)
        files[f"runbook{SUFFIX[language]}"] = runbook(language, prefix)
    return files


def differences(directory: Path, prefix: str, *, pages: str = PAGES) -> list[Difference]:
    """Which files in the folder are not as this version makes them. Files that it would not make are not looked at.

    Raises:
        ValueError: as ``assets``.
        OSError: a file is there and cannot be read.
    """
    found = (_difference(directory, name, text, prefix) for name, text in assets(prefix, pages=pages).items())
    return [difference for difference in found if difference is not None]


def _difference(directory: Path, name: str, text: str, prefix: str) -> Difference | None:
    try:
        present = (directory / name).read_bytes()
    except FileNotFoundError:
        return Difference(name, "missing")
    if present == text.encode():
        return None
    is_page = name.endswith(".md")  # a page may name what this version does not emit
    return Difference(name, "stale", () if is_page else tuple(unknown_series(present.decode(errors="replace"), prefix)))


def unknown_series(text: str, prefix: str) -> Iterator[str]:
    """The series with this prefix in a dashboard or rule file that no process of this version can emit; with their
    labels where it is only for a value of these.
    """
    recorded = [rule.record for rule in recording_rules()]
    plain = text.replace('\\"', '"')  # as in JSON
    names = dict.fromkeys(re.findall(rf"(?:\b\w+:)?\b{re.escape(prefix)}\w+(?::\w+)?(?:\{{[^{{}}]*\}})?", plain))
    found: dict[str, None] = {}
    for selected in names:
        name = selected.partition("{")[0]
        for asked in (name, selected):
            if any(problems_in(asked.replace(prefix, "@", 1), recorded)):
                found[asked] = None
                break
    yield from found
