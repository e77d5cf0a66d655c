"""The neighbours of a finding's block, one symbol each."""

from __future__ import annotations

import msgspec

from kvscope.analysis.scene import Scene
from kvscope.checks.finding import Finding
from kvscope.events import finding_schema as words
from kvscope.events.finding_schema import BlockHistory
from kvscope.reports.printable import clean
from kvscope.reports.wording import Fact

SYMBOLS = {
    words.OWN: "O",
    words.SHARED: "S",
    words.OTHER: "R",
    words.DISPUTED: "!",
    words.RECEIVING: "W",
    words.HELD: "H",
    words.CACHED: "C",
    words.NOBODY: ".",
    words.NULL: "N",
    words.OUTSIDE: "x",
}
UNKNOWN_SYMBOL = "?"


class Strip(msgspec.Struct, frozen=True, kw_only=True):
    """Neighbouring blocks. ``marked`` is the index of the finding's block; ``legend`` names the symbols that occur."""

    first_block: int
    last_block: int
    symbols: str
    marked: int
    block: int
    legend: list[Fact]


def strip_of(finding: Finding, history: BlockHistory | None, scene: Scene | None) -> Strip | None:
    """From the pool's own calls where they are known, else as declared. None where nothing is known."""
    if finding.block_id is None:
        return None
    if history is not None and history.strip is not None:
        first, blocks = history.strip.first_block, list(history.strip.blocks)
    elif scene is not None and scene.strip:
        first, blocks = scene.strip[0].block_id, [neighbour.whose for neighbour in scene.strip]
    else:
        return None
    marked = finding.block_id - first
    if not 0 <= marked < len(blocks):  # the record contradicts itself
        return None
    owner = "this request" if finding.request_id is None else clean(finding.request_id)
    meaning = {
        words.OWN: f"{owner}'s own",
        words.SHARED: f"{owner}'s, shared",
        words.OTHER: "another request's",
        words.DISPUTED: "in more tables than it has references",
        words.RECEIVING: "waits for a receive",
        words.HELD: "referenced, in no table",
        words.CACHED: "free, can be hit",
        words.NOBODY: "free" if history is not None else "nobody's",
        words.NULL: "null block",
        words.OUTSIDE: "outside the pool",
    }
    legend = [(SYMBOLS[word], text) for word, text in meaning.items() if word in blocks]
    if not set(blocks) <= set(SYMBOLS):
        legend.append((UNKNOWN_SYMBOL, "not known to this version"))
    return Strip(
        first_block=first,
        last_block=first + len(blocks) - 1,
        symbols="".join(SYMBOLS.get(word, UNKNOWN_SYMBOL) for word in blocks),
        marked=marked,
        block=finding.block_id,
        legend=legend,
    )
