"""Whose the block of a finding was and is, in words: from the pool's own calls where they are known, else from what
the scheduler declared.
"""

from __future__ import annotations

from kvscope.analysis.scene import Scene
from kvscope.checks.finding import Finding
from kvscope.events.finding_schema import BlockHistory
from kvscope.facts import allocator as facts
from kvscope.reports.printable import clean
from kvscope.reports.wording import Fact, action_of, counted, is_about_content, is_after_release, listed, ordinal

UNKNOWN_REQUEST = "a request that is not known"
NOT_RECORDED = "the calls of the pool are not in this trace"

_WHEN = {
    facts.CAUSE_FINISH: "when it finished",
    facts.CAUSE_ABORT: "when it was aborted",
    facts.CAUSE_PREEMPT: "when it was preempted",
    facts.CAUSE_WINDOW: "when it slid out of the attention window",
    facts.CAUSE_DEFERRED: "by a free that had been put off",
    facts.CAUSE_COPY: "after it had been copied",
    facts.CAUSE_LOAD_FAILED: "because its load failed",
    facts.CAUSE_UNPIN: "by a connector that let it go",
    facts.CAUSE_RESET: "with a reset of the prefix cache",
    facts.CAUSE_EVICT: "as a checkpoint that is needed no more",
    facts.CAUSE_UNKNOWN: "by a call that belongs neither to its end nor to a preemption",
}


def owner_facts(finding: Finding, history: BlockHistory | None, scene: Scene | None) -> list[Fact]:
    """``allocated for``, ``freed by`` and, where it is not the same, who has the block now. The finding has a block."""
    block = -1 if finding.block_id is None else finding.block_id
    if scene is not None and not 0 <= block < scene.num_blocks:
        return _nobody(f"nobody: there is no such block, the pool has 0 to {scene.num_blocks - 1}")
    if history is not None and history.generation is None:
        return _nobody("nobody: the pool has no such block")
    if (history is not None and history.status == "null") or (scene is not None and block == scene.null_block_id):
        return _nobody("nobody: the null block is never handed out")
    if history is not None:
        return _from_pool(finding, history, scene)
    if scene is not None:
        return [("allocated for", _declared_now(scene)), ("freed by", f"{_declared_before(scene)}; {NOT_RECORDED}")]
    unknown = "not known: neither the record nor a replay tells"
    return [("allocated for", unknown), ("freed by", unknown)]


def stale_generation(finding: Finding, history: BlockHistory) -> int | None:
    """The generation through which a released block was used; None for a finding of another kind."""
    if not is_after_release(finding.reason):
        return None
    if finding.generation is not None and finding.generation != history.generation:
        return finding.generation
    return history.freed_generation if history.freed_generation is not None else finding.generation


def released_when(history: BlockHistory) -> str:
    """``step 171``, or less where less is known."""
    return "a step that is not known" if history.freed_step is None else f"step {history.freed_step}"


def _nobody(said: str) -> list[Fact]:
    return [("allocated for", said), ("freed by", "nobody")]


# As the pool's calls say ----------------------------------------------------------------------------------------------


def _from_pool(finding: Finding, history: BlockHistory, scene: Scene | None) -> list[Fact]:
    if not history.generation:
        return [("allocated for", "nobody: the pool has never handed it out"), ("freed by", "nobody")]
    stale = stale_generation(finding, history)
    is_over = stale is not None and stale != history.generation
    found = [
        ("allocated for", _held_then(finding, stale, scene) if is_over and stale is not None else _handed_out(history)),
        ("freed by", _freed(history, stale)),
    ]
    now = _now(history, handed_out_again=is_over)
    if stale is not None:
        now += _consequence(finding, history, handed_out_again=is_over)
    if now:
        found.append(("now", now))
    if is_about_content(finding.reason):
        found.append(("written", _written(history)))
    return found


def _handed_out(history: BlockHistory) -> str:
    step = "" if history.allocated_step is None else f" in step {history.allocated_step}"
    return f"{_request(history.allocated_for)}{step}: {_generation(history.generation)}"


def _held_then(finding: Finding, generation: int, scene: Scene | None) -> str:
    """Of a generation that is over, who was given the block is known from the table in which it still stands."""
    own = [t for t in scene.tenures if t.request_id == finding.request_id] if scene is not None else []
    since = f" in step {own[0].since_step}" if own else ""
    return f"{_request(finding.request_id)}{since}: {_generation(generation)}"


def _generation(generation: int | None) -> str:
    if generation is None:
        return "a generation that is not known"
    return f"generation {generation} (the {ordinal(generation)} time that it was handed out)"


def _freed(history: BlockHistory, stale: int | None) -> str:
    if history.freed_step is None and history.freed_by is None:
        return "nobody until now"
    if stale is not None and history.freed_generation is not None and stale < history.freed_generation:
        return f"no longer known for generation {stale}; the last time by {_freed(history, None)}"
    when = _WHEN.get(history.freed_cause or facts.CAUSE_UNKNOWN, f"({clean(history.freed_cause or '')})")
    who = "nobody that is known" if history.freed_by is None else clean(history.freed_by)
    said = f"{who} in {released_when(history)}, {when}"
    if history.freed_generation is not None:
        said += f": the end of generation {history.freed_generation}"
        if history.freed_generation == history.generation and history.references:
            said += ", until a prefix hit took it up again"
    return said


def _now(history: BlockHistory, *, handed_out_again: bool) -> str:
    """Who has the block at the moment; empty where it is as it was handed out."""
    owners = list(dict.fromkeys(_request(owner.request_id) for owner in history.owners if owner.live))
    gone = list(dict.fromkeys(_request(owner.request_id) for owner in history.owners if not owner.live))
    who = listed([*owners, *[""] * max(history.num_owners - len(history.owners), 0)], 3)
    references = counted(history.references or 0, "reference", "references")
    if history.status == "free":
        cached = ", and can be brought back by a prefix hit" if history.hash_count else ""
        return f"free{cached}" + (f"; it still stands in the table of {who}" if owners else "")
    waits = "waits for a receive; " if history.status == "reserved" else ""
    if not owners:
        by = f"; {listed(gone, 3)} gave it up" if gone else ""
        return f"{waits}{references}, in no table of a live request{by}"
    if handed_out_again:
        since = "" if history.allocated_step is None else f" since step {history.allocated_step}"
        return f"{waits}{who}{since}: generation {history.generation}"
    if len(owners) > (history.references or 0):
        return f"{waits}in the tables of {who}, and has {references}"
    if owners == [_request(history.allocated_for)] and not waits:
        return ""
    return f"{waits}in the {'table' if len(owners) == 1 else 'tables'} of {who}"


def _consequence(finding: Finding, history: BlockHistory, *, handed_out_again: bool) -> str:
    """What the use of a released block amounts to."""
    reads, user = action_of(finding.reason) == "READ", _request(finding.request_id)
    others = [owner.request_id for owner in history.owners if owner.live and owner.request_id != finding.request_id]
    if others:
        written = history.last_written_step if handed_out_again else None
        last = "" if written is None else f", last written in step {written}"
        return f"{last}. {user} {'reads' if reads else 'overwrites'} what {_request(others[0])} has there"
    if history.status != "free":
        return ""
    return f". {user} {'reads' if reads else 'writes to'} it all the same, and the pool may hand it out at any moment"


def _written(history: BlockHistory) -> str:
    declared, done = history.init_prefix_declared or 0, history.init_prefix_len or 0
    if not declared:
        return f"nothing in generation {history.generation}"
    last = "" if history.last_written_step is None else f", the last in step {history.last_written_step}"
    pending = f"; the results for {declared - done} of them are not back" if declared > done else ""
    return f"{counted(declared, 'token', 'tokens')} in generation {history.generation}{last}{pending}"


def _request(request_id: str | None) -> str:
    return UNKNOWN_REQUEST if request_id is None else clean(request_id)


# As declared ----------------------------------------------------------------------------------------------------------


def _declared_now(scene: Scene) -> str:
    if not scene.holders:
        return f"nobody that the scheduler declared at this step; {NOT_RECORDED}"
    since = {tenure.request_id: tenure for tenure in reversed(scene.tenures) if tenure.until_step is None}
    said = []
    for request_id in scene.holders[:3]:
        tenure = since.get(request_id)
        when = "" if tenure is None else f" since step {tenure.since_step}, as its logical block {tenure.index}"
        said.append(clean(request_id) + when)
    more = f" and {len(scene.holders) - 3} more" if len(scene.holders) > 3 else ""
    return f"{'; '.join(said)}{more} (as declared)"


def _declared_before(scene: Scene) -> str:
    past = next((tenure for tenure in scene.tenures if tenure.until_step is not None), None)
    if past is None:
        return "nobody before in this trace"
    when = f"from step {past.since_step}, {past.cause} by step {past.until_step}"
    return f"{clean(past.request_id)}, declared {when}"
