"""The table of seams itself."""

from __future__ import annotations

import re

from kvscope.boundary.seams import HOSTS, seam_table
from unit.boundary.fakes import Told

TABLE = seam_table(Told())


def test_every_seam_says_what_it_touches_yields_and_is_needed_for() -> None:
    for seam in TABLE:
        assert re.fullmatch(r"vllm(\.\w+)+:\w+\.\w+", seam.target)
        assert seam.fact
        assert seam.lost


def test_names_and_targets_are_distinct() -> None:
    assert len({seam.name for seam in TABLE}) == len({seam.target for seam in TABLE}) == len(TABLE)


def test_every_role_has_seams_and_only_bootstrap_seams_wait_for_their_module() -> None:
    assert {seam.role for seam in TABLE} == {"bootstrap", "frontend", "engine", "worker", "worker_v1", "worker_v2"}
    assert [seam.when_loaded for seam in TABLE] == [seam.role == "bootstrap" for seam in TABLE]


def test_the_hosts_that_were_read_are_named() -> None:
    assert all(re.fullmatch(r"\d+\.\d+", host) for host in HOSTS)
