"""Says about a finding everything that a report shows, in words, once. Drawing adds only the layout.

The order is the one that readers know from sanitizers: the access, who the block was allocated for, who freed it, its
neighbours, what was expected, why it could be wrong, what to do next.
"""

from __future__ import annotations

import msgspec

from kvscope.analysis.scene import Scene
from kvscope.analysis.tally import FoldedFinding
from kvscope.checks.catalog import RULES
from kvscope.checks.finding import Finding
from kvscope.checks.rule import HOST_ONLY, OUTSIDE, PART_OF_CHECK, Rule
from kvscope.events.finding_schema import BlockHistory
from kvscope.events.frozen import frozen_line
from kvscope.facts.plans import PAD_SLOT
from kvscope.reports.ownership import owner_facts
from kvscope.reports.printable import clean
from kvscope.reports.strip import Strip, strip_of
from kvscope.reports.wording import Fact, access_of, is_of_scheduler, listed, other_request_of, value_text

IN_BATCH = "in the batch"
"""What handover_request_mismatch expects or sees, where it looked at the runner's batch and not at the message."""


class PreparedFinding(msgspec.Struct, frozen=True, kw_only=True):
    """One finding in words. ``repeats`` is empty where it was seen once, ``strip`` None where it names no block."""

    reason: str
    severity: str
    frozen: str
    title: str
    access: list[Fact]
    owners: list[Fact]
    strip: Strip | None
    comparison: list[Fact]
    doubts: list[Fact]
    repeats: str
    next_steps: list[str]


_UNKNOWN_RULE = Rule(
    reason="unknown",
    check="?",
    severity="error",
    title="a reason that this version does not know",
    fires="",
    silent="",
    sources=("the recording process", "its own knowledge"),
    proves_not=HOST_ONLY,
    rank=0,
)


def prepare(folded: FoldedFinding, command: str = "kvscope") -> PreparedFinding:
    """The report of a folded finding: its first occurrence in full, the others counted. ``command`` is how kvscope is
    typed where the report is read.
    """
    finding, scene = folded.first, folded.scene
    history = folded.history or (scene.history if scene is not None else None)
    is_about_block = finding.block_id is not None and finding.slot != PAD_SLOT  # what is padded is not written
    rule = RULES.get(finding.reason, _UNKNOWN_RULE)
    return PreparedFinding(
        reason=finding.reason,
        severity=rule.severity,
        frozen=frozen_line(finding, rule, folded.action),
        title=f"{rule.severity.upper()} {finding.reason} ({rule.check}): {rule.title}",
        access=_access(folded, history),
        owners=owner_facts(finding, history, scene) if is_about_block else [],
        strip=strip_of(finding, history, scene) if is_about_block else None,
        comparison=_comparison(finding, scene, rule),
        doubts=[("not proved", rule.proves_not), ("not judged", rule.silent)] if rule.silent else [],
        repeats=_repeats(folded),
        next_steps=_next_steps(folded, rule, command),
    )


def _access(folded: FoldedFinding, history: BlockHistory | None) -> list[Fact]:
    finding, scene = folded.first, folded.scene
    facts = [access_of(finding, scene, history)]
    if finding.request_id is not None:
        row = "" if finding.row is None else f", row {finding.row} of the batch"
        facts.append(("request", clean(finding.request_id) + row))
    elif finding.reason.startswith(("write_padding", "dummy")):
        facts.append(("request", "none: the slot serves no request"))
    if finding.other_request_id is not None:
        facts.append(other_request_of(finding, history))
    facts.append(("step", f"{finding.step} (trace_id {clean(finding.trace_id) or '-'})"))
    where = []
    if finding.group_id is not None:
        where.append(f"group {finding.group_id}")
    if finding.position is not None:
        where.append(f"position {finding.position} of the sequence")
    if scene and scene.logical_block is not None:
        where.append(f"logical block {scene.logical_block}")
    if where:
        facts.append(("where", ", ".join(where)))
    of_runner = folded.runner and not is_of_scheduler(finding.reason)
    facts.append(("seen in", listed(folded.processes, 3) + (f", runner {folded.runner}" if of_runner else "")))
    return facts


def _comparison(finding: Finding, scene: Scene | None, rule: Rule) -> list[Fact]:
    if finding.expected is None and finding.actual is None:
        return [("compared", rule.evidence)]
    of_guard = PART_OF_CHECK.get(rule.check) == "kv_guard_config"
    if of_guard and isinstance(finding.actual, str):  # each text may be made of both sources
        facts = [("expected", value_text(finding.expected, finding, scene)), ("actual", clean(finding.actual))]
        return [*facts, ("compared", rule.evidence)]
    seen, other = rule.sources
    if IN_BATCH in {finding.expected, finding.actual}:
        seen = "the requests in the runner's batch"
    expected = value_text(finding.expected, finding, scene)
    # Where a rule holds one side against an invariant, what was expected comes from neither: it is the declared value.
    alone = rule.invariant or (rule.rank == OUTSIDE and finding.expected is not None and not _is_limit(finding))
    facts = [("expected", expected if alone else f"{expected}: {other}")]
    facts.append(("actual", f"{value_text(finding.actual, finding, scene)}: {seen}"))
    return [*facts, ("broken", other)] if alone else facts


def _is_limit(finding: Finding) -> bool:
    """Whether ``expected`` is the highest block that there is, not a declared one."""
    return finding.reason == "bind_block_out_of_range"


def _repeats(folded: FoldedFinding) -> str:
    sides = {
        (True, True): "recorded live and found again by the replay",
        (True, False): "found by the replay only; the live process recorded none",
        (False, True): "recorded live only; the replay did not find it",
        (False, False): "",
    }[folded.in_replay > 0, folded.live > 0]
    also = f"; the same access also fits {', '.join(folded.first.also)}" if folded.first.also else ""
    if folded.count <= 1:
        return f"seen once, {sides}{also}"
    steps = f"step {folded.first_step}"
    if folded.last_step != folded.first_step:
        steps = f"steps {folded.first_step} to {folded.last_step}"
    names = [clean(request_id) for request_id in folded.requests]
    more = folded.num_requests - len(names)
    who = f", requests {', '.join(names)}{f' and {more} more' if more else ''}" if folded.num_requests > 1 else ""
    return f"seen {folded.count:,} times, {steps}{who}; {sides}{also}"


def _next_steps(folded: FoldedFinding, rule: Rule, command: str) -> list[str]:
    steps = [f"{command} rules {folded.first.reason}" if rule is not _UNKNOWN_RULE else f"{command} rules"]
    if folded.action == "log" and rule is not _UNKNOWN_RULE and rule.part != "kv_transfer":
        steps.append(f'set "action": "raise" in {rule.part} to stop the engine at the first one')
    return steps
