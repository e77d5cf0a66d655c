"""Makes the view of a run out of readouts: one after the other, so that it knows rates and how long blocks are held."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvscope.metrics.families import Family
from kvscope.metrics.readout import Readout, prefix_in
from kvscope.metrics.view import Cost, Coverage, EngineView, Hold, Latency, Pool, RequestBlocks, Reuse, Transfers, View

__all__ = ["MONITOR_OFF", "REQUESTS_ARE_NO_LABELS", "Viewer", "readout_of"]

MOST_REQUESTS = 10
SHORTEST_S = 0.2
"""Rates over less time than this would say more about when a process publishes than about what it does."""

MONITOR_OFF = "KV Monitor is switched off at run time; kvscope monitor on resumes"
REQUESTS_ARE_NO_LABELS = "no metric names a request; give the run's folder, whose trace does"

_NO_POOL = (
    "no process reports the block pool; KV Monitor counts it in EngineCore, when additional_config switches it on"
)
_NO_REUSE = "no request was admitted yet"
_NO_CONNECTOR = "this engine has no KV connector"
_NO_TRANSFERS = "no process reports what its KV connector does"
_NO_CHECKS = "KV Trace and KV Guard are both off, or have judged nothing yet"
_NO_COST = "no process has reported its own time yet"
_NOTHING = "no process of this run has published anything yet"


def readout_of(families: Sequence[Family], *, at_s: float) -> Readout:
    """What the families say at one time."""
    prefix = prefix_in(family.name for family in families)
    return Readout(_samples(families, prefix or ""), at_s=at_s)


def _samples(families: Sequence[Family], prefix: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    for family in families:
        name = family.name.removeprefix(prefix)
        for sample in family.samples:
            if family.kind != "histogram":
                yield name, sample.labels, sample.value
                continue
            yield f"{name}_sum", sample.labels, sample.value
            yield f"{name}_count", sample.labels, sample.count
            for bound, count in sample.buckets:
                yield f"{name}_bucket", {**sample.labels, "le": repr(bound)}, count


class Viewer:
    """Views of one run. `source` is where its readouts come from: an address or a path."""

    def __init__(self, source: str, run_id: str | None = None) -> None:
        self._source = source
        self._run_id = run_id
        self._last: Readout | None = None
        self._held_since: dict[tuple[str, str], tuple[float, bool]] = {}

    def view(
        self,
        readout: Readout,
        *,
        requests: list[RequestBlocks] | None = None,
        holds: list[Hold] | None = None,
        coverage_share: float | None = None,
        no_data: Mapping[str, str] | None = None,
    ) -> View:
        """The view at this readout. What metrics do not have is given beside it; `no_data` says why it is not, by the
        name of a section, of all engines' too (`pool`, `reuse`, `transfers`).
        """
        before, is_first = self._last, self._last is None
        if before is not None and readout.at_s - before.at_s < SHORTEST_S:
            before = None
        self._last = readout
        why = dict(no_data or {})
        of_engines = {part: said for part in ("pool", "reuse", "transfers") if (said := why.pop(part, None))}
        engines = [_engine(name, readout, before, of_engines) for name in readout.engines() if name != "frontend"]
        if not engines:
            why.setdefault("engines", _NOTHING)
        held = self._holds(readout, is_first=is_first) if holds is None else holds
        if held is None:
            why.setdefault("holds", _NO_POOL)
        findings = readout.by("reason", "guard_violations_total")
        coverage = _coverage(readout, coverage_share)
        if coverage is None:
            why.setdefault("coverage", _NO_CHECKS)
            why.setdefault("findings", _NO_CHECKS)
        cost = _cost(readout, before)
        if cost is None:
            why.setdefault("cost", _NO_COST)
        if requests is None:
            why.setdefault("requests", REQUESTS_ARE_NO_LABELS)
        most = sorted(requests or [], key=lambda request: (-request.blocks, request.request_id))
        return View(
            source=self._source,
            run_id=self._run_id,
            at_s=readout.at_s,
            over_s=None if before is None else readout.at_s - before.at_s,
            engines=engines,
            holds=held,
            requests=None if requests is None else most[:MOST_REQUESTS],
            requests_more=max(len(most) - MOST_REQUESTS, 0),
            findings=_counts(findings) if coverage is not None or any(findings.values()) else None,
            coverage=coverage,
            cost=cost,
            no_data=why,
        )

    def empty(self, at_s: float, why: str) -> View:
        """A view of nothing, and why."""
        self._last = None
        self._held_since.clear()
        sections = ("engines", "holds", "requests", "findings", "coverage", "cost")
        return View(
            source=self._source,
            run_id=self._run_id,
            at_s=at_s,
            over_s=None,
            engines=[],
            holds=None,
            requests=None,
            requests_more=0,
            findings=None,
            coverage=None,
            cost=None,
            no_data=dict.fromkeys(sections, why),
        )

    def _holds(self, readout: Readout, *, is_first: bool) -> list[Hold] | None:
        found: list[Hold] = []
        is_known = False
        for engine in readout.engines():
            held = readout.by("cause", "kv_blocks", engine=engine, state="held")
            is_known |= bool(held) or readout.total("kv_blocks", engine=engine) is not None
            for cause, blocks in held.items():
                key = (engine, cause)
                if not blocks:
                    self._held_since.pop(key, None)
                    continue
                since_s, before = self._held_since.setdefault(key, (readout.at_s, is_first))
                found.append(
                    Hold(
                        engine=engine,
                        cause=cause,
                        blocks=int(blocks),
                        for_s=readout.at_s - since_s,
                        since_before=before,
                    )
                )
        return sorted(found, key=lambda hold: -hold.for_s) if is_known else None


def _engine(name: str, readout: Readout, before: Readout | None, why: Mapping[str, str]) -> EngineView:
    pool, reuse, transfers = _pool(name, readout, before), _reuse(name, readout), _transfers(name, readout, before)
    connectors = [c for c, value in readout.by("connector", "kvscope_info", engine=name).items() if value]
    missing = {
        "pool": _NO_POOL if pool is None else None,
        "reuse": (_NO_POOL if pool is None else _NO_REUSE) if reuse is None else None,
        "transfers": (_NO_CONNECTOR if connectors == ["none"] else _NO_TRANSFERS) if transfers is None else None,
    }
    return EngineView(
        engine=name,
        pool=pool,
        reuse=reuse,
        transfers=transfers,
        no_data={part: why.get(part, said) for part, said in missing.items() if said is not None},
    )


def _pool(engine: str, readout: Readout, before: Readout | None) -> Pool | None:
    percent = readout.get("kv_cache_usage_percent", engine=engine)
    blocks = readout.by("state", "kv_blocks", engine=engine)
    if percent is None and not blocks:
        return None
    return Pool(
        usage=None if percent is None else percent / 100,
        blocks=_counts(blocks, zero=True),
        held=_counts(readout.by("cause", "kv_blocks", engine=engine, state="held")),
        fill=readout.by("group", "kv_token_fill_ratio", engine=engine),
        deferred_blocks=_whole(readout.total("kv_deferred_free_blocks", engine=engine)),
        alloc_per_s=_rate("kv_block_alloc_total", readout, before, engine=engine),
        free_per_s=_rate("kv_block_free_total", readout, before, engine=engine),
        evict_per_s=_rate("kv_block_evict_total", readout, before, engine=engine),
    )


def _reuse(engine: str, readout: Readout) -> Reuse | None:
    queries = readout.by("unit", "prefix_cache_queries_total", engine=engine)
    if not any(queries.values()):
        return None
    hits = readout.by("unit", "prefix_cache_hits_total", engine=engine)
    return Reuse(
        window=readout.by("unit", "prefix_cache_hit_ratio", engine=engine),
        since_start={unit: hits.get(unit, 0.0) / count for unit, count in queries.items() if count},
        queries=_counts(queries),
    )


def _transfers(engine: str, readout: Readout, before: Readout | None) -> Transfers | None:
    connectors = [c for c, value in readout.by("connector", "kvscope_info", engine=engine).items() if value]
    tokens = readout.by("direction", "pd_transfer_tokens_total", engine=engine)
    queued = readout.total("pd_transfer_queue_depth", engine=engine)
    in_flight = readout.total("pd_transfer_in_flight", engine=engine)
    if connectors == ["none"] or (not tokens and queued is None and in_flight is None):
        return None
    rates = {d: _rate("pd_transfer_tokens_total", readout, before, engine=engine, direction=d) for d in tokens}
    return Transfers(
        connector=", ".join(connectors) or "unknown",
        tokens=_counts(tokens, zero=True),
        tokens_per_s={direction: rate for direction, rate in rates.items() if rate is not None},
        queued=_whole(queued),
        in_flight=_whole(in_flight),
        failures=_counts(readout.by("cause", "pd_transfer_failures_total", engine=engine)),
        latency=_latency("pd_transfer_latency_seconds", engine, readout),
        wait=_latency("pd_wait_seconds", engine, readout),
    )


def _latency(name: str, engine: str, readout: Readout) -> Latency | None:
    count = readout.total(f"{name}_count", engine=engine)
    if count is None:
        return None
    return Latency(
        count=int(count),
        p50_s=readout.quantile(0.5, name, engine=engine),
        p95_s=readout.quantile(0.95, name, engine=engine),
    )


def _coverage(readout: Readout, share: float | None) -> Coverage | None:
    rows = readout.total("guard_rows_audited_total")
    checks = readout.by("check", "guard_checks_total")
    if rows is None and not checks:
        return None
    stalled = readout.by("check", "guard_checks_stalled")
    return Coverage(
        rows_audited=int(rows or 0),
        share=share,
        checks=_counts(checks),
        skipped=_counts(readout.by("cause", "guard_checks_skipped_total")),
        stalled=sorted(check for check, value in stalled.items() if value),
    )


def _cost(readout: Readout, before: Readout | None) -> Cost | None:
    hooks = readout.by("hook", "hook_seconds_total")
    ages = list(readout.by("engine", "snapshot_age_seconds").values())
    if not hooks:
        return None
    dearest = sorted(((hook, s) for hook, s in hooks.items() if s), key=lambda item: -item[1])
    return Cost(
        hook_s=sum(hooks.values()),
        share=_rate("hook_seconds_total", readout, before),
        hooks=dict(dearest),
        faults=_counts(readout.by("hook", "hook_faults_total")),
        dropped=_counts(readout.by("cause", "records_dropped_total")),
        snapshot_age_s=max(ages) if ages else None,
    )


def _rate(name: str, readout: Readout, before: Readout | None, **labels: str) -> float | None:
    """Per second since the readout before. A counter that fell belongs to a new run: no rate can be told."""
    now = readout.total(name, **labels)
    then = before.total(name, **labels) if before is not None else None
    if before is None or now is None or then is None or now < then:
        return None
    return (now - then) / (readout.at_s - before.at_s)


def _counts(values: Mapping[str, float], *, zero: bool = False) -> dict[str, int]:
    """Whole numbers, without those that are zero unless asked for."""
    return {name: int(value) for name, value in values.items() if value or zero}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
