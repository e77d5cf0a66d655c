"""Every reason a finding can have in this version."""

from __future__ import annotations

from .audit import BOOKS_RULES
from .bind import BIND_RULES
from .connector import COMPLETION_RULES, FAILED_LOAD_RULES, INVALID_RULES, RECEIVE_RULES
from .content import CONTENT_RULES
from .context_parallel import CONTEXT_RULES, COORDINATE_RULES, LENGTH_RULES
from .drafts import DRAFT_RULES
from .dummy import DUMMY_RULES
from .generation import GENERATION_RULES
from .handover import HANDOVER_RULES
from .initialized import INITIALIZED_RULES
from .lifecycle import LIFECYCLE_RULES
from .lifetime import LIFETIME_RULES
from .lists import LIST_RULES
from .operator import OPERATOR_RULES
from .ownership import OWNERSHIP_RULES
from .pool import POOL_RULES
from .read import READ_RULES
from .results import RESULT_RULES
from .row import GROUP_RULES, ROW_RULES
from .rule import Rule
from .write import WRITE_RULES

RULES: dict[str, Rule] = {
    function.rule.reason: function.rule
    for family in (
        POOL_RULES,
        BOOKS_RULES,
        BIND_RULES,
        LIFECYCLE_RULES,
        RECEIVE_RULES,
        COMPLETION_RULES,
        FAILED_LOAD_RULES,
        INVALID_RULES,
        LIST_RULES,
        CONTENT_RULES,
        LIFETIME_RULES,
        HANDOVER_RULES,
        COORDINATE_RULES,
        GROUP_RULES,
        ROW_RULES,
        WRITE_RULES,
        READ_RULES,
        GENERATION_RULES,
        OWNERSHIP_RULES,
        INITIALIZED_RULES,
        OPERATOR_RULES,
        CONTEXT_RULES,
        LENGTH_RULES,
        DUMMY_RULES,
        RESULT_RULES,
        DRAFT_RULES,
    )
    for function in family
}
"""Reason -> rule, in the order in which a step meets them."""
