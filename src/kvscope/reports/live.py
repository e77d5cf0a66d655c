"""A view of a run in words and bars, section by section: what ``kvscope top`` draws, at once or again and again.

A section is a heading and lines; a line is the name of a style and text that fits the width.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from datetime import datetime

import msgspec

from kvscope.metrics.view import Cost, Coverage, EngineView, Latency, Pool, Reuse, Transfers, View

__all__ = ["Line", "Section", "headline", "sections"]

Line = tuple[str, str]

LABEL = 11
MOST_ROWS = 8

_STATES = (("used", "#"), ("held", "!"), ("cached", "+"), ("free", "."))
"""With the letter that stands for each in a bar. The null block is one and not drawn."""


class Section(msgspec.Struct, frozen=True):
    """``name`` is short and stays the same from view to view."""

    name: str
    heading: str
    lines: list[Line]


def headline(view: View) -> str:
    """Which run it is, when, and where that is said."""
    when = datetime.fromtimestamp(view.at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S") if view.at_s else "no time"
    return "  ".join(part for part in (view.run_id and f"run {view.run_id}", when, view.source) if part)


def sections(view: View, width: int = 80) -> list[Section]:
    """All sections, in the order in which they are read."""
    engines = [Section(f"engine-{e.engine}", f"engine {e.engine}", _engine(e, view, width)) for e in view.engines]
    if not engines:
        engines = [Section("engines", "engines", _no_data(view.no_data.get("engines"), width))]
    return [
        *engines,
        Section("requests", "requests by blocks held", _requests(view, width)),
        Section("holds", "oldest holds", _holds(view, width)),
        Section("findings", "findings", _findings(view, width)),
        Section("coverage", "coverage", _coverage(view.coverage, view, width)),
        Section("cost", "kvscope's own cost", _cost(view.cost, view, width)),
    ]


def _engine(engine: EngineView, view: View, width: int) -> list[Line]:
    def missing(label: str, part: str) -> list[Line]:
        return _labelled(label, f"no data: {engine.no_data.get(part)}", width, "dim")

    lines = missing("pool", "pool") if engine.pool is None else _pool(engine.pool, view, width)
    lines += missing("hits", "reuse") if engine.reuse is None else _reuse(engine.reuse, width)
    lines += missing("transfers", "transfers") if engine.transfers is None else _transfers(engine.transfers, width)
    return lines


def _pool(pool: Pool, view: View, width: int) -> list[Line]:
    lines: list[Line] = []
    if pool.usage is not None:
        room = width - LABEL - 12
        lines += [("", f"{'usage':{LABEL}}{_percent(pool.usage):>8}  [{_bar([(pool.usage, '#')], room)}]")]
    total = sum(pool.blocks.values())
    if total:
        shares = [(pool.blocks.get(state, 0) / total, letter) for state, letter in _STATES]
        lines += [("", f"{'blocks':{LABEL}}{total:>8,}  [{_bar(shares, width - LABEL - 12)}]")]
        letters = dict(_STATES)
        said = [f"{state} {n:,} {letters.get(state, '')}".strip() for state, n in _in_order(pool.blocks)]
        lines += _labelled("", "   ".join(said), width)
    if pool.held:
        lines += _labelled("held", _counted(pool.held), width, "warn")
    if pool.fill:
        lines += _labelled("token fill", ", ".join(f"group {g} {_percent(r)}" for g, r in pool.fill.items()), width)
    rates = [("allocated", pool.alloc_per_s), ("freed", pool.free_per_s), ("evicted", pool.evict_per_s)]
    known = [f"{rate:,.1f} {what}/s" for what, rate in rates if rate is not None]
    if known:
        lines += _labelled("rates", f"{', '.join(known)}, over {view.over_s or 0:.1f} s", width)
    return lines


def _in_order(blocks: Mapping[str, int]) -> list[tuple[str, int]]:
    known = [state for state, _ in _STATES]
    return sorted(blocks.items(), key=lambda item: known.index(item[0]) if item[0] in known else len(known))


def _reuse(reuse: Reuse, width: int) -> list[Line]:
    window = ", ".join(f"{unit}s {_percent(share)}" for unit, share in reuse.window.items())
    said = f"{window} within the window" if window else "nothing was queried within the window"
    totals = (
        f"{_percent(share)} of {reuse.queries.get(unit, 0):,} {unit}s" for unit, share in reuse.since_start.items()
    )
    return _labelled("hits", f"{said}; {', '.join(totals)} since the start", width)


def _transfers(transfers: Transfers, width: int) -> list[Line]:
    said = [transfers.connector]
    said += [f"{direction} {tokens:,} tokens" for direction, tokens in transfers.tokens.items()]
    said += [f"{direction} {rate:,.1f} tokens/s" for direction, rate in transfers.tokens_per_s.items()]
    said += [
        f"{what} {n:,}"
        for what, n in (("queued", transfers.queued), ("in flight", transfers.in_flight))
        if n is not None
    ]
    lines = _labelled("transfers", ", ".join(said), width)
    for what, latency in (("latency", transfers.latency), ("wait", transfers.wait)):
        if latency is not None and latency.count:
            lines += _labelled("", f"{what}: {_latency(latency)}", width)
    if transfers.failures:
        lines += _labelled("", f"failed: {_counted(transfers.failures)}", width, "bad")
    return lines


def _latency(latency: Latency) -> str:
    parts = [f"P50 {_seconds(latency.p50_s)}"] if latency.p50_s is not None else []
    parts += [f"P95 {_seconds(latency.p95_s)}"] if latency.p95_s is not None else []
    return f"{', '.join(parts)} of {latency.count:,} since the start"


def _requests(view: View, width: int) -> list[Line]:
    if view.requests is None:
        return _no_data(view.no_data.get("requests"), width)
    if not view.requests:
        return [("dim", "no request holds a block")]
    lines = [("label", f"{'blocks':>8}  {'tokens':>8}  {'engine':>6}  request")]
    for request in view.requests:
        row = f"{request.blocks:>8,}  {request.tokens:>8,}  {request.engine:>6}  {request.request_id}"
        lines.append(("", row if len(row) <= width else f"{row[: width - 1]}…"))
    if view.requests_more:
        lines.append(("dim", f"and {view.requests_more:,} more"))
    return lines


def _holds(view: View, width: int) -> list[Line]:
    if view.holds is None:
        return _no_data(view.no_data.get("holds"), width)
    if not view.holds:
        return _labelled("none", "every block that is referenced belongs to a live request", width, "dim")
    lines = []
    for hold in view.holds[:MOST_ROWS]:
        lasted = (
            f"for {'at least ' if hold.since_before else ''}{_seconds(hold.for_s)}" if hold.for_s else "seen just now"
        )
        said = f"{hold.blocks:>8,} blocks, {hold.cause}, engine {hold.engine}, {lasted}"
        lines += [("", line) for line in textwrap.wrap(said, width, subsequent_indent=" " * 9, drop_whitespace=False)]
    return lines + _rest(len(view.holds))


def _findings(view: View, width: int) -> list[Line]:
    if view.findings is None:
        return _no_data(view.no_data.get("findings"), width)
    if not view.findings:
        return [("good", "none")]
    most = sorted(view.findings.items(), key=lambda item: (-item[1], item[0]))
    lines = [("bad", f"{count:>8,}  {reason}") for reason, count in most[:MOST_ROWS]]
    return lines + _rest(len(most))


def _coverage(coverage: Coverage | None, view: View, width: int) -> list[Line]:
    if coverage is None:
        return _no_data(view.no_data.get("coverage"), width)
    share = f", {_percent(coverage.share)} of the scheduled ones" if coverage.share is not None else ""
    lines = _labelled("audited", f"{coverage.rows_audited:,} rows{share}", width)
    if coverage.checks:
        lines += _labelled("checks", _counted(coverage.checks), width)
    if coverage.skipped:
        lines += _labelled("skipped", _counted(coverage.skipped), width)
    if coverage.stalled:
        lines += _labelled("stalled", ", ".join(coverage.stalled), width, "bad")
    return lines


def _cost(cost: Cost | None, view: View, width: int) -> list[Line]:
    if cost is None:
        return _no_data(view.no_data.get("cost"), width)
    share = f", {_percent(cost.share)} of the time over {view.over_s or 0:.1f} s" if cost.share is not None else ""
    lines = _labelled("in hooks", f"{_seconds(cost.hook_s)} in all processes together{share}", width)
    dearest = ", ".join(f"{hook} {_seconds(s)}" for hook, s in list(cost.hooks.items())[:4])
    lines += _labelled("dearest", dearest, width) if dearest else []
    if cost.faults:
        lines += _labelled("faults", _counted(cost.faults), width, "bad")
    if cost.dropped:
        lines += _labelled("dropped", f"records: {_counted(cost.dropped)}", width, "bad")
    if cost.snapshot_age_s is not None:
        lines += _labelled(
            "last heard", f"{_seconds(cost.snapshot_age_s)} ago, from the process that is silent longest", width
        )
    return lines


def _no_data(why: str | None, width: int) -> list[Line]:
    return [("dim", line) for line in textwrap.wrap(f"no data: {why}", width, subsequent_indent="  ")]


def _labelled(label: str, text: str, width: int, style: str = "") -> list[Line]:
    head = f"{label:{LABEL}}"
    wrapped = textwrap.wrap(text, width, initial_indent=head, subsequent_indent=" " * LABEL, break_on_hyphens=False)
    return [(style, line) for line in wrapped]


def _rest(count: int) -> list[Line]:
    return [("dim", f"and {count - MOST_ROWS:,} more")] if count > MOST_ROWS else []


def _bar(shares: Iterable[tuple[float, str]], room: int) -> str:
    """Whole cells; what is there at all gets at least one of them."""
    drawn = ""
    for share, letter in shares:
        cells = max(round(share * room), 1) if share > 0 else 0
        drawn += letter * cells
    return drawn[:room].ljust(room)


def _counted(counts: Mapping[str, int]) -> str:
    most = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    said = [f"{name} {count:,}" for name, count in most[:MOST_ROWS]]
    return ", ".join([*said, f"and {len(most) - MOST_ROWS} more"] if len(most) > MOST_ROWS else said)


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def _seconds(value: float) -> str:
    if value < 1:
        return f"{value * 1000:.1f} ms"
    if value < 120:
        return f"{value:.1f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
