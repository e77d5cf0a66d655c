"""The stories of all faults of the allocator, by the fault's name."""

from kvscope.testing.faults.access_faults import ACCESS_STORIES
from kvscope.testing.faults.draft_faults import DRAFT_STORIES
from kvscope.testing.faults.list_faults import LIST_STORIES
from kvscope.testing.faults.pool_faults import POOL_STORIES
from kvscope.testing.faults.prefix_faults import PREFIX_STORIES
from kvscope.testing.faults.story import Told
from kvscope.testing.faults.use_faults import USE_STORIES

STORIES: dict[str, Told] = USE_STORIES | PREFIX_STORIES | POOL_STORIES | ACCESS_STORIES | LIST_STORIES | DRAFT_STORIES
