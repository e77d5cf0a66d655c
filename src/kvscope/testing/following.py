"""Follows every request of a trace through its steps: declared, written, read, and its result taken up.

    following = Following()
    replay.run(following.watch(trace.records()))
    assert not following.missing(client_ids)

The request is the one that a client knows by its id, and a step is one `trace_id`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

from kvscope.analysis.reader import Entry
from kvscope.events.plan_schema import ReadRecord, WriteRecord
from kvscope.events.schema import BindRecord, BoundaryRecord

Place = tuple[str, str]
"""A request in a step: ``(trace_id, request_id)``."""


class Following:
    """What one trace says of each request in each of its steps. Memory grows with the rows of the trace."""

    def __init__(self) -> None:
        self.bound: dict[str, list[str]] = defaultdict(list)
        self.written: Counter[Place] = Counter()
        self.read: Counter[Place] = Counter()
        self.given: Counter[Place] = Counter()
        self.taken: Counter[Place] = Counter()
        self.admitted: dict[str, set[str]] = defaultdict(set)
        self.preemptions = 0
        self._prompts: dict[str, int] = {}
        self._prompt_steps: Counter[str] = Counter()

    @property
    def chunked_prompts(self) -> int:
        """Requests whose prompt took more than one step."""
        return sum(steps > 1 for steps in self._prompt_steps.values())

    def watch(self, entries: Iterable[Entry]) -> Iterator[Entry]:
        """The same entries, noted as they pass."""
        for entry in entries:
            self._note(entry)
            yield entry

    def _note(self, entry: Entry) -> None:
        record = entry.record
        if isinstance(record, BindRecord):
            self._bind(record)
        elif isinstance(record, WriteRecord):
            self.written.update((str(record.trace_id), str(name)) for name in record.requests)
        elif isinstance(record, ReadRecord):
            self.read.update((str(record.trace_id), str(name)) for name in record.requests)
        elif isinstance(record, BoundaryRecord):
            if record.kind == "frontend_admit":
                self.admitted[str(record.client_request_id)].add(str(record.request_id))
            elif record.kind in {"worker_result", "update_input"} and isinstance(record.result_requests, list):
                station = self.given if record.kind == "worker_result" else self.taken
                station.update((str(record.trace_id), str(name)) for name in record.result_requests)

    def _bind(self, record: BindRecord) -> None:
        self.preemptions += len(record.preempted)
        for request in record.requests:
            name, computed = str(request.request_id), request.num_computed_tokens
            self.bound[name].append(str(record.trace_id))
            if isinstance(request.num_prompt_tokens, int):
                self._prompts.setdefault(name, request.num_prompt_tokens)
            if isinstance(computed, int) and computed < self._prompts.get(name, 0):
                self._prompt_steps[name] += 1

    def engine_requests(self, client_id: str) -> set[str]:
        """The engine requests behind what the client sees; the id of an HTTP answer is a prefix of what is admitted."""
        exact = self.admitted.get(client_id)
        if exact is not None:
            return exact
        prefix = f"{client_id}-"
        return {name for seen, names in self.admitted.items() if seen.startswith(prefix) for name in names}

    def missing(self, client_ids: Iterable[str], ranks: int = 1) -> list[str]:
        """What is not there of these requests. Each must be admitted and bound, and in each of its steps, under the
        trace_id of the bind, be written and read by every rank, given back by a worker, and taken up by the scheduler.
        """
        lacking = []
        for client_id in client_ids:
            names = self.engine_requests(client_id)
            if not names:
                lacking.append(f"{client_id}: not admitted")
            for name in sorted(names):
                lacking += list(self._lacking(name, ranks))
        return lacking

    def _lacking(self, name: str, ranks: int) -> Iterator[str]:
        if name not in self.bound:
            yield f"{name}: not bound"
        for trace_id in self.bound.get(name, ()):
            place = (trace_id, name)
            for verb, times, expected in (
                ("written", self.written[place], ranks),
                ("read", self.read[place], ranks),
                ("taken up", self.taken[place], 1),
            ):
                if times != expected:
                    yield f"{name}: bound in {trace_id}, {verb} {times} times there instead of {expected}"
            if not self.given[place]:
                yield f"{name}: bound in {trace_id}, no worker gave a result"
