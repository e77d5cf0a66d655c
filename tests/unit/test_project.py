"""The rules about the source itself: who may import whom, how long a module is, what an exemption must say."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from kvscope.config import OutputConfig

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "kvscope"
SHIMS = PACKAGE / "testing" / "shims"

# A station imports from stations with a smaller number, except that the boundary makes facts. `sinks` and `metrics`
# stand side by side; `runtime` wires everything before it together in a running process.
STATIONS = {
    "boundary": 1,
    "facts": 2,
    "state": 3,
    "checks": 4,
    "events": 5,
    "sinks": 6,
    "metrics": 6,
    "runtime": 7,
    "analysis": 8,
    "reports": 9,
    "cli": 10,
}
FREE = ("kvscope.config", "kvscope.errors", "kvscope.fence", "kvscope.logs", "kvscope.events.schema")
MAY_IMPORT_BOUNDARY = {"boundary", "plugin", "testing"}
MAY_IMPORT_VLLM = {"boundary", "plugin", "testing"}
RUNS_INSIDE_VLLM = {
    "plugin",
    "boundary",
    "facts",
    "state",
    "checks",
    "events",
    "sinks",
    "metrics",
    "runtime",
    "monitor",
}
OFFLINE = {"analysis", "reports", "cli"}
LONGEST_MODULE = 400


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if SHIMS not in path.parents]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """The station or top-level module that a dotted name belongs to: `state` for `kvscope.state.blocks`."""
    return [*module.split("."), ""][1]


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """The dotted names that a module imports, anywhere in it, with their lines. `from a import b` gives `a.b`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = list(path.relative_to(PACKAGE.parent).parts[: -node.level] if node.level else ())
            base = ".".join([*start, *filter(None, [node.module])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def offence(importer: str, imported: str) -> str | None:
    """Which rule the import breaks, if any."""
    here, there = part_of(importer), part_of(imported)
    if within(imported, "vllm"):
        return None if here in MAY_IMPORT_VLLM else "only boundary, plugin and testing know vLLM"
    if not within(imported, "kvscope") or here == there or any(within(imported, free) for free in FREE):
        return None
    if (here, there) == ("boundary", "facts"):
        return None
    if there == "boundary" and here not in MAY_IMPORT_BOUNDARY:
        return "only plugin and testing import boundary"
    if here in RUNS_INSIDE_VLLM and there in OFFLINE:
        return "what runs inside vLLM imports nothing that is for offline use"
    if here in STATIONS and there in STATIONS and STATIONS[there] >= STATIONS[here]:
        return f"station {STATIONS[here]} imports from station {STATIONS[there]}"
    return None


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_imports_follow_the_stations(path: Path) -> None:
    importer = name_of(path)
    found = [(imported, line, offence(importer, imported)) for imported, line in imports_of(path)]
    broken = [f"{path.relative_to(ROOT)}:{line}: {imported}: {why}" for imported, line, why in found if why]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("kvscope.state.blocks", "kvscope.checks.rule"),
        ("kvscope.checks.rule", "vllm.v1.core"),
        ("kvscope.cli.doctor", "kvscope.boundary.seams"),
        ("kvscope.metrics.exporter", "kvscope.analysis.reader"),
        ("kvscope.sinks.file", "kvscope.metrics.store"),
        ("kvscope.monitor", "kvscope.reports.html"),
        ("kvscope.boundary.worker", "kvscope.state.bindings"),
        ("kvscope.sinks.file", "kvscope.runtime.run"),
    ],
)
def test_a_forbidden_import_is_seen(importer: str, imported: str) -> None:
    assert offence(importer, imported)


@pytest.mark.parametrize("path", [path for path in modules() if path.name == "__init__.py"], ids=name_of)
def test_a_package_says_first_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path.relative_to(ROOT)}: no docstring"


def test_packages_and_documentation_number_the_stations_as_they_are_numbered_here() -> None:
    packages = {name: PACKAGE / name / "__init__.py" for name in STATIONS if (PACKAGE / name / "__init__.py").exists()}
    docstrings = {
        name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) for name, path in packages.items()
    }
    said = {name: re.match(r"Station (\d+)", text or "") for name, text in docstrings.items()}
    assert {name: int(found[1]) for name, found in said.items() if found and int(found[1]) != STATIONS[name]} == {}
    table = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = {name: int(number) for number, name in re.findall(r"^\| (\d+) \| `(\w+)/` \|", table, re.MULTILINE)}
    assert listed == {name: STATIONS[name] for name in packages}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_is_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST_MODULE


def test_readme_calls_a_setting_inactive_as_long_as_nothing_reads_it() -> None:
    source = "\n".join(p.read_text(encoding="utf-8") for p in modules() if name_of(p) != "kvscope.config")
    unread = [f.name for f in fields(OutputConfig) if not re.search(rf"\boutput\.{f.name}\b", source)]
    (row,) = re.findall(r"^\| `kv_output` \|.*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert unread == re.findall(r"`(\w+)`, [^;|]*: `inactive: not in this version`", row)


def exemptions() -> Iterator[tuple[str, str]]:
    for folder in ("src", "tests", "scripts"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path == Path(__file__):
                continue
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                if re.search(r"#\s*(noqa|type:\s*ignore)", line):
                    yield f"{path.relative_to(ROOT)}:{number}", line


def explained(line: str) -> bool:
    """Whether an exemption names its code and is followed by a reason: `# noqa: BLE001  a hook fails open`."""
    named = re.sub(r"#\s*noqa:\s*[A-Z]+\d+(,\s*[A-Z]+\d+)*|#\s*type:\s*ignore\[[\w,\s-]+\]", "#", line)
    if re.search(r"noqa|type:\s*ignore", named):
        return False
    return len(named.rpartition("#")[2].strip(" -—:")) >= 10 or len(re.findall(r"#\s*\w[^#]{9,}", named)) > 0


def test_every_exemption_names_its_code_and_its_reason() -> None:
    bare = [f"{where}: {line.strip()}" for where, line in exemptions() if not explained(line)]
    assert not bare, "\n".join(bare)


def test_an_exemption_without_a_reason_is_seen() -> None:
    assert not explained("import torch  # noqa: F401")
    assert not explained("value = thing()  # type: ignore")
    assert not explained("value = thing()  # noqa")
    assert explained("except Exception:  # noqa: BLE001  foreign code runs here; the fault is counted")
    assert explained("value = thing()  # type: ignore[attr-defined]  # set by the seam when it is installed")
