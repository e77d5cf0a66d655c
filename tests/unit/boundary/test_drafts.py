"""What is read of a runner's counts: rows in batch order, without padding, and nothing from a device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvscope.boundary import drafts
from kvscope.boundary.ledger import OBSERVER
from kvscope.facts.requests import Verification
from unit.boundary.fakes import Told

torch = pytest.importorskip("torch")
ON_DEVICE = SimpleNamespace(device=SimpleNamespace(type="cuda"))


def v1(sampled: Any, *, unfinished: tuple[bool, ...] = (False, False)) -> Told:
    told = Told()
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(num_reqs=2, req_ids=["a", "b", "left over"]),
        discard_request_mask=SimpleNamespace(np=np.array([*unfinished, True])),
    )
    metadata = SimpleNamespace(num_draft_tokens=np.array([3, 0]))
    drafts.after_sample_v1(told, runner, ("logits", metadata), {}, SimpleNamespace(sampled_token_ids=sampled))
    return told


def v2(**batch: Any) -> Told:
    told = Told()
    said = {
        "num_reqs": 2, "req_ids": ["a", "b"], "num_draft_tokens": 3, "num_draft_tokens_per_req": np.array([3, 0]),
        **batch,
    }  # fmt: skip
    result = (None, torch.tensor([2, 0, 9]), torch.tensor([2, 0, 9]))
    runner = SimpleNamespace(adaptive_verification=None)
    drafts.after_sample_v2(told, runner, (), {"input_batch": SimpleNamespace(**said)}, result)
    return told


def test_a_v1_runner_accepts_what_is_no_placeholder() -> None:
    ((name, (counted,)),) = v1(torch.tensor([[5, 6, -1, -1], [7, -1, -1, -1], [8, 8, 8, 8]])).calls
    assert name == "on_verified"
    assert counted == Verification(request_ids=["a", "b"], drafted=[3, 0], accepted=[1, 0], rejected=[None, None])


def test_a_row_in_the_middle_of_its_prompt_accepts_nothing_that_counts() -> None:
    ((_, (counted,)),) = v1(torch.tensor([[5, 6, 6, 6], [7, -1, -1, -1]]), unfinished=(False, True)).calls
    assert counted.accepted == [3, None]


def test_fewer_rows_than_the_batch_has_are_told_as_they_are() -> None:
    ((_, (counted,)),) = v1(torch.tensor([[5, 6, 6, 6]]), unfinished=(False, True)).calls
    assert (counted.request_ids, counted.accepted) == (["a", "b"], [3])


def test_a_v2_runner_counts_by_itself() -> None:
    ((name, (counted,)),) = v2().calls
    assert name == "on_verified"
    assert counted == Verification(request_ids=["a", "b"], drafted=[3, 0], accepted=[1, None], rejected=[2, 0])


def test_a_batch_without_drafts_is_not_looked_at() -> None:
    assert v2(num_draft_tokens=0).calls == v2(num_draft_tokens_per_req=None).calls == []
    told = Told()
    drafts.after_sample_v1(told, None, (), {"spec_decode_metadata": None}, None)
    assert told.calls == []


def test_counts_on_a_device_are_left_there() -> None:
    assert v1(ON_DEVICE).calls == [("on_verification_skipped", ("device_tensors", 2))]
    told = Told()
    drafts.after_prepare_inputs(told, None, (), {}, (None, None, ON_DEVICE))
    assert told.calls == []


def test_a_drafter_tells_what_it_counts_as_rejected() -> None:
    told, drafter = Told(), SimpleNamespace()
    drafts.observe_drafts(SimpleNamespace(drafter=drafter), told)
    drafts.after_prepare_inputs(getattr(drafter, OBSERVER), drafter, (), {}, (None, None, torch.tensor([2, 0])))
    assert told.calls == [("expect_drafts", ("runner_v1.verify",)), ("on_rejected", ([2, 0],))]


def test_only_the_last_stage_is_expected_to_count() -> None:
    told = Told()
    drafts.observe_drafts(SimpleNamespace(is_last_pp_rank=True), told)
    drafts.observe_drafts(SimpleNamespace(is_last_pp_rank=False), told)
    drafts.observe_drafts(SimpleNamespace(), told)
    assert told.calls == [("expect_drafts", ("runner_v2.verify",))]
