"""Action isolate on vLLM's own scheduler, with the seams wrapped as they are in EngineCore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from kvscope.boundary.allocator import PoolReader
from kvscope.boundary.isolation import SchedulerControl
from kvscope.boundary.ledger import OBSERVER, Ledger
from kvscope.boundary.topology import read_topology
from kvscope.checks.finding import Finding
from kvscope.errors import ViolationError
from kvscope.events.names import RequestNames
from kvscope.plugin import PluginHub
from kvscope.runtime.engine import EngineJudge
from kvscope.runtime.isolation import Isolation
from unit.boundary.idle_schedulers import BLOCK, add, answers, make_scheduler, result_of
from unit.runtime.support import MADE, make_run

PROMPTS = {"a": list(range(4, 74)), "b": list(range(104, 174)), "c": list(range(204, 274))}
"""Three blocks each, the last of them partly filled; nobody shares anything."""


class Engine:
    """One observed scheduler and no worker."""

    def __init__(self, folder: Path, *, asynchronous: bool = False, num_blocks: int = 200, **run: Any) -> None:
        self.scheduler = make_scheduler(asynchronous=asynchronous, num_blocks=num_blocks)
        topology = read_topology(self.scheduler.kv_cache_config)
        actions = {"trace": "isolate", "guard": "isolate", **run}
        self.run = make_run(folder, "engine", topology=topology, **actions)
        self.judge = EngineJudge(self.run, topology)
        setattr(self.scheduler, OBSERVER, self.judge)
        if self.judge.pool is not None:
            self.judge.pool.observe(PoolReader(self.judge, self.scheduler))
        self.control = SchedulerControl(self.scheduler)
        self.judge.isolate_with(Isolation(self.control, self.run.names, self.judge.pool))

    @property
    def isolation(self) -> Isolation:
        assert self.judge.isolation is not None
        return self.judge.isolation

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def update(self, scheduled: Any) -> dict[str, tuple[int, str | None]]:
        return answers(self.scheduler.update_from_output(scheduled, result_of(scheduled)))

    def step(self) -> dict[str, tuple[int, str | None]]:
        return self.update(self.schedule())

    def blocks(self, name: str) -> list[int]:
        return [block.block_id for block in self.scheduler.kv_cache_manager.coordinator.single_type_managers[0]
                .req_to_blocks[name]]  # fmt: skip

    def find(self, request: str | None = "a", reason: str = "write_target_mismatch", **facts: Any) -> Finding:
        """What a rule of this process has found in the last step that was scheduled."""
        step = facts.pop("step", self.judge._step)
        found = Finding(reason=reason, step=step, trace_id=f"run.0.{step}", request_id=request, group_id=0, **facts)
        self.run.report([found], "runner", "plan")
        return found

    def assert_books_agree(self) -> None:
        """The ledger has followed what isolation did to the pool, and no rule took offence at it."""
        assert self.judge.pool is not None
        counts = [block.ref_cnt for block in self.pool.blocks]
        assert self.judge.pool.ledger.differences(counts, None) == []
        assert {reason for reason, _ in self.run.coverage.findings} <= {
            "write_target_mismatch", "write_foreign_block", "read_foreign_block", "free_list_damaged", "double_free",
        }  # fmt: skip
        assert all(hook.faults == 0 for hook in HOOKS.values())


HOOKS: dict[str, Any] = {}


@pytest.fixture(scope="module", autouse=True)
def _wrapped() -> Iterator[None]:
    hub = PluginHub(Ledger())
    for seam in hub.table:
        if seam.role in {"engine", "allocator"} and seam.name not in {"scheduler.create", "engine.shutdown"}:
            assert hub.ledger.install(seam)
    HOOKS.update(hub.ledger.hooks)
    yield
    hub.ledger.uninstall_all()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def engine(**settings: Any) -> Engine:
        made.append(Engine(tmp_path / str(len(made)), **settings))
        return made[-1]

    yield engine
    for each in made:
        each.scheduler.shutdown()
    while MADE:
        MADE.pop().close()


@pytest.fixture
def engine(make: Callable[..., Engine]) -> Engine:
    """Three requests that have all had their first token."""
    engine = make()
    for name, prompt in PROMPTS.items():
        add(engine.scheduler, name, prompt)
    assert engine.step() == {"a": (1, None), "b": (1, None), "c": (1, None)}
    return engine


def test_only_the_named_request_ends_and_its_token_is_withheld(engine: Engine) -> None:
    scheduled = engine.schedule()
    engine.find("a")
    assert engine.update(scheduled) == {"a": (0, "error"), "b": (1, None), "c": (1, None)}
    assert engine.control.live() == ["b", "c"]
    scheduled = engine.schedule()
    assert scheduled.finished_req_ids == {"a"}
    assert engine.update(scheduled) == {"b": (1, None), "c": (1, None)}
    engine.assert_books_agree()


def test_it_ends_with_an_error_even_if_it_would_have_stopped_in_that_step(make: Callable[..., Engine]) -> None:
    engine = make()
    add(engine.scheduler, "a", PROMPTS["a"], max_tokens=1)
    scheduled = engine.schedule()
    engine.find("a")
    assert engine.update(scheduled) == {"a": (0, "error")}


def test_rows_that_are_already_submitted_are_discarded(make: Callable[..., Engine]) -> None:
    engine = make(asynchronous=True)
    for name in "ab":
        add(engine.scheduler, name, PROMPTS[name])
    engine.step()
    first, second = engine.schedule(), engine.schedule()
    assert set(second.num_scheduled_tokens) == {"a", "b"}
    engine.find("a", step=engine.judge._step - 1)
    assert engine.update(first) == {"a": (0, "error"), "b": (1, None)}
    assert engine.update(second) == {"b": (1, None)}
    assert engine.step() == {"b": (1, None)}
    engine.assert_books_agree()


def test_a_finding_of_a_later_step_waits_for_its_own_result(make: Callable[..., Engine]) -> None:
    engine = make(asynchronous=True)
    for name in "ab":
        add(engine.scheduler, name, PROMPTS[name])
    engine.step()
    first, second = engine.schedule(), engine.schedule()
    seen = engine.judge.on_updated
    engine.judge.on_updated = lambda: None  # type: ignore[method-assign]  # what a result does to the pool has its own test
    engine.find("a")
    assert engine.update(first) == {"a": (1, None), "b": (1, None)}
    assert engine.update(second) == {"a": (0, "error"), "b": (1, None)}
    engine.judge.on_updated = seen  # type: ignore[method-assign]  # put back what was there


def test_its_blocks_are_held_back_and_found_by_nobody(engine: Engine) -> None:
    blocks = engine.blocks("a")
    scheduled = engine.schedule()
    engine.find("a")
    engine.update(scheduled)
    assert engine.isolation.held == set(blocks)
    assert [engine.pool.blocks[block].ref_cnt for block in blocks] == [1] * len(blocks)
    assert [engine.pool.blocks[block].block_hash for block in blocks] == [None] * len(blocks)
    # The same prompt again: nothing is hit, and nothing that is held is handed out.
    add(engine.scheduler, "again", PROMPTS["a"])
    scheduled = engine.schedule()
    assert scheduled.num_scheduled_tokens["again"] == len(PROMPTS["a"])
    assert not set(engine.blocks("again")) & set(blocks)
    engine.update(scheduled)
    engine.assert_books_agree()


def test_a_reset_gets_them_back_before_it_runs(engine: Engine) -> None:
    scheduled = engine.schedule()
    engine.find("a")
    engine.update(scheduled)
    for name in "bc":
        engine.scheduler.finish_requests(name, _aborted())
    assert engine.scheduler.reset_prefix_cache()
    assert engine.isolation.held == set()
    assert engine.pool.get_num_free_blocks() == len(engine.pool.blocks) - 1
    engine.assert_books_agree()


def test_a_pool_that_refuses_to_hold_a_block_stops_the_engine(engine: Engine) -> None:
    """A block without references that the free queue has lost, as a fault of the pool may leave it."""
    lost = engine.pool.free_block_queue.popleft_n.__wrapped__(engine.pool.free_block_queue, 1)[0]
    scheduled = engine.schedule()
    engine.find("a", block_id=lost.block_id)
    with pytest.raises(ViolationError):
        engine.update(scheduled)
    with pytest.raises(ViolationError):
        engine.schedule()


def test_it_works_without_the_guard_as_well(make: Callable[..., Engine]) -> None:
    engine = make(guard=None)
    for name in "ab":
        add(engine.scheduler, name, PROMPTS[name])
    scheduled = engine.schedule()
    blocks = engine.blocks("a")
    engine.find("a")
    assert engine.update(scheduled) == {"a": (0, "error"), "b": (1, None)}
    assert engine.isolation.held == set(blocks)
    engine.find("gone", block_id=blocks[0])
    engine.step()
    assert engine.isolation.held == set(blocks)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert [engine.pool.blocks[block].ref_cnt for block in blocks] == [0, 0, 0]


def test_a_reset_under_running_requests_gets_them_back_too(engine: Engine) -> None:
    scheduled = engine.schedule()
    engine.find("a")
    engine.update(scheduled)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert engine.isolation.held == set()
    assert set(engine.step()) == {"b", "c"}


def _aborted() -> Any:
    from vllm.v1.request import RequestStatus

    return RequestStatus.FINISHED_ABORTED


def test_both_requests_of_a_finding_end(engine: Engine) -> None:
    scheduled = engine.schedule()
    engine.find("a", "read_foreign_block", other_request_id="b", block_id=engine.blocks("b")[0])
    assert engine.update(scheduled) == {"a": (0, "error"), "b": (0, "error"), "c": (1, None)}
    engine.assert_books_agree()


@pytest.fixture
def sharing(make: Callable[..., Engine]) -> Engine:
    """``a`` and ``b`` have their first two blocks in common."""
    engine = make()
    add(engine.scheduler, "a", PROMPTS["a"])
    engine.step()
    add(engine.scheduler, "b", PROMPTS["a"][: 2 * BLOCK] + [300] * 10)
    add(engine.scheduler, "c", PROMPTS["c"])
    engine.step()
    assert engine.blocks("a")[:2] == engine.blocks("b")[:2]
    return engine


def test_who_has_the_damaged_block_ends_as_well(sharing: Engine) -> None:
    scheduled = sharing.schedule()
    sharing.find("c", "write_foreign_block", block_id=sharing.blocks("a")[0])
    assert sharing.update(scheduled) == {"a": (0, "error"), "b": (0, "error"), "c": (0, "error")}
    assert all(block.ref_cnt == 1 for block in sharing.pool.blocks if block.block_id in sharing.isolation.held)
    sharing.assert_books_agree()


def test_reading_a_block_spoils_it_for_nobody_else(sharing: Engine) -> None:
    scheduled = sharing.schedule()
    sharing.find("a", "read_foreign_block", block_id=sharing.blocks("a")[0])
    assert sharing.update(scheduled) == {"a": (0, "error"), "b": (1, None), "c": (1, None)}
    # What it shared goes on being used, and nobody new finds it.
    assert [sharing.pool.blocks[block].ref_cnt for block in sharing.blocks("b")[:2]] == [2, 2]
    assert set(sharing.blocks("b")[:2]) <= sharing.isolation.held
    sharing.assert_books_agree()


@pytest.mark.parametrize("block", [None, 0, 5, 10_000])
def test_a_finding_that_names_no_request_is_only_logged(engine: Engine, block: int | None) -> None:
    scheduled = engine.schedule()
    engine.find(None, "free_list_damaged", block_id=block)
    assert engine.update(scheduled) == {"a": (1, None), "b": (1, None), "c": (1, None)}
    assert engine.isolation.held == set()
    assert engine.run.pending == []


@pytest.mark.parametrize("block", [0, -1, 10_000])
def test_a_block_that_is_nobodys_is_not_held(engine: Engine, block: int) -> None:
    blocks = set(engine.blocks("a"))
    scheduled = engine.schedule()
    engine.find("a", "write_target_mismatch", block_id=block)
    assert engine.update(scheduled)["b"] == (1, None)
    assert engine.isolation.held == blocks


def test_of_a_request_that_is_over_only_the_blocks_are_held(engine: Engine) -> None:
    blocks = engine.blocks("a")
    engine.scheduler.finish_requests("a", _aborted())
    assert [engine.pool.blocks[block].ref_cnt for block in blocks] == [0] * 3
    scheduled = engine.schedule()
    engine.find("a", block_id=blocks[0])
    assert engine.update(scheduled) == {"b": (1, None), "c": (1, None)}
    assert engine.isolation.held == set(blocks)
    assert [engine.pool.blocks[block].ref_cnt for block in blocks] == [1] * 3
    add(engine.scheduler, "again", PROMPTS["a"])
    assert engine.schedule().num_scheduled_tokens["again"] == len(PROMPTS["a"])
    engine.assert_books_agree()


def test_who_got_the_damaged_block_since_ends_in_its_place(engine: Engine) -> None:
    blocks = engine.blocks("a")
    engine.scheduler.finish_requests("a", _aborted())
    others = engine.pool.get_new_blocks(engine.pool.get_num_free_blocks() - 3)
    add(engine.scheduler, "d", [400 + token for token in range(70)])
    scheduled = engine.schedule()
    (block, *_) = set(engine.blocks("d")) & set(blocks)
    theirs = set(engine.blocks("d"))
    engine.find("a", block_id=block)
    assert engine.update(scheduled) == {"b": (1, None), "c": (1, None), "d": (0, "error")}
    left = set(blocks) - theirs - {block.block_id for block in others}
    assert engine.isolation.held == theirs | left
    engine.pool.free_blocks(others)
    engine.assert_books_agree()


@pytest.mark.parametrize(("num_blocks", "isolated"), [(59, []), (60, ["a"]), (119, ["a"]), (120, ["a", "b"])])
def test_what_would_take_too_much_of_the_pool_stops_the_engine(
    make: Callable[..., Engine], num_blocks: int, isolated: list[str]
) -> None:
    """Each has three blocks, and 5 % of the pool may be held."""
    engine = make(num_blocks=num_blocks)
    for name, prompt in PROMPTS.items():
        add(engine.scheduler, name, prompt)
    for name in isolated:
        scheduled = engine.schedule()
        engine.find(name)
        assert engine.update(scheduled)[name] == (0, "error")
    held, live = set(engine.isolation.held), engine.control.live()
    assert len(held) == 3 * len(isolated)
    scheduled = engine.schedule()
    engine.find(live[0])
    with pytest.raises(ViolationError, match=f"action=isolate request={live[0]} "):
        engine.update(scheduled)
    assert (engine.isolation.held, engine.control.live()) == (held, live)
    with pytest.raises(ViolationError):
        engine.schedule()


def test_a_finding_between_two_steps_is_answered_with_the_next_result(engine: Engine) -> None:
    engine.find("a")
    scheduled = engine.schedule()
    assert "a" not in scheduled.num_scheduled_tokens
    assert engine.update(scheduled) == {"a": (0, "error"), "b": (1, None), "c": (1, None)}


def test_the_last_request_is_answered_by_a_step_without_work(make: Callable[..., Engine]) -> None:
    engine = make()
    add(engine.scheduler, "a", PROMPTS["a"])
    engine.step()
    engine.find("a")
    scheduled = engine.schedule()
    assert scheduled.total_num_scheduled_tokens == 0
    assert engine.update(scheduled) == {"a": (0, "error")}
    assert not engine.scheduler.has_requests() or engine.step() == {}


@pytest.mark.parametrize("max_tokens", [2, 8], ids=["it stops", "it goes on"])
def test_what_a_result_does_to_the_pool_is_isolated_before_it_is_let_out(
    make: Callable[..., Engine], max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make()
    add(engine.scheduler, "a", PROMPTS["a"], max_tokens=max_tokens)
    add(engine.scheduler, "b", PROMPTS["b"])
    engine.step()
    scheduled = engine.schedule()
    takes = engine.scheduler.kv_cache_manager.take_events

    def take_events() -> Any:
        engine.find("a", "double_free")
        return takes()

    monkeypatch.setattr(engine.scheduler.kv_cache_manager, "take_events", take_events)
    assert engine.update(scheduled) == {"a": (0, "error"), "b": (1, None)}
    assert engine.control.live() == ["b"]
    monkeypatch.undo()
    assert engine.step() == {"b": (1, None)}


def test_every_client_gets_its_own_answer(make: Callable[..., Engine]) -> None:
    engine = make()
    for client, name in enumerate("abc"):
        add(engine.scheduler, name, PROMPTS[name], client=client)
    engine.step()
    scheduled = engine.schedule()
    engine.find("a", "read_foreign_block", other_request_id="c")
    outputs = engine.scheduler.update_from_output(scheduled, result_of(scheduled))
    assert {client: answers({client: of}) for client, of in outputs.items()} == {
        0: {"a": (0, "error")},
        1: {"b": (1, None)},
        2: {"c": (0, "error")},
    }


@pytest.mark.parametrize("kind", ["pooling", "session"])
def test_what_the_front_end_would_misunderstand_stops_the_engine(engine: Engine, kind: str) -> None:
    request = engine.scheduler.requests["a"]
    if kind == "pooling":
        request.pooling_params = object()
    else:
        request.resumable = True
    engine.find("a")
    with pytest.raises(ViolationError, match="action=isolate request=a "):
        engine.schedule()


@pytest.mark.parametrize("mode", ["plain", "hashed"])
def test_a_worker_of_another_process_says_who_it_is_by_the_name_that_may_be_written(engine: Engine, mode: Any) -> None:
    names = RequestNames(mode, b"0" * 16 if mode == "hashed" else b"")
    isolation = Isolation(engine.control, names)
    found = Finding(reason="write_target_mismatch", step=1, trace_id="t", request_id=str(names("a")))
    assert isolation.act(found, posted=True) is None
    assert engine.control.live() == ["b", "c"]


def test_a_worker_of_another_process_that_may_name_nobody_stops_the_engine(engine: Engine) -> None:
    isolation = Isolation(engine.control, RequestNames("omitted"))
    found = Finding(reason="write_target_mismatch", step=1, trace_id="t")
    assert "omitted" in str(isolation.act(found, posted=True))
    assert isolation.act(found) is None
    assert engine.control.live() == ["a", "b", "c"]


def test_an_answer_that_fails_reaches_nobody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduled = engine.schedule()
    engine.find("a")
    monkeypatch.setattr("kvscope.boundary.isolation._replace", lambda *_: 1 // 0)
    assert engine.update(scheduled) == {"b": (1, None), "c": (1, None)}
    assert "isolate could not answer 1 requests (ZeroDivisionError)" in caplog.text


def test_another_parts_raise_goes_first(make: Callable[..., Engine]) -> None:
    engine = make(trace="isolate", guard="raise")
    for name in "ab":
        add(engine.scheduler, name, PROMPTS[name])
    scheduled = engine.schedule()
    engine.find("a")
    engine.find("b", "write_foreign_block")
    with pytest.raises(ViolationError, match="action=raise request=b "):
        engine.update(scheduled)
    assert engine.control.live() == ["a", "b"]
