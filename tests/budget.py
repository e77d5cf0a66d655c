"""How much the tests that make up their own cases try: less in `make test`, all of it with `--long`."""

from __future__ import annotations

USUAL_SHARE = 0.2
FEWEST = 4

_SHARE = [USUAL_SHARE]


def be_thorough() -> None:
    """To be called before tests are collected: the number of examples is read where a test is defined."""
    _SHARE[0] = 1.0


def is_thorough() -> bool:
    """Whether `--long` was given."""
    return _SHARE[0] == 1.0


def examples(thorough: int) -> int:
    """How many examples to try of the number that a thorough run tries."""
    return max(min(FEWEST, thorough), round(thorough * _SHARE[0]))
