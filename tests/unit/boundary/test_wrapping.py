"""What a wrapped method does to its host: nothing, whatever happens on our side."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from kvscope.boundary.ledger import MAX_FAULTS, Ledger
from kvscope.boundary.wrapping import around, creation, listing, scoped
from kvscope.errors import ConfigurationError, ViolationError
from unit.boundary.fakes import HostError, Told, make_host, observed, seam


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    return make_host(monkeypatch)


def installed(wrap: Any, target: str = "Engine.step") -> Ledger:
    ledger = Ledger()
    assert ledger.install(seam(wrap, target))
    return ledger


def test_a_wrapper_looks_like_what_it_wraps(host: type[Any]) -> None:
    original, signature = host.step, inspect.signature(host.step)
    installed(around())
    assert (host.step.__name__, host.step.__doc__, host.step.__qualname__) == (
        original.__name__,
        original.__doc__,
        original.__qualname__,
    )
    assert inspect.signature(host.step) == signature
    assert host.step.__wrapped__ is original


def test_an_object_without_an_observer_is_passed_through(host: type[Any]) -> None:
    ledger = installed(around(before=fail, after=fail, settle=fail))
    assert host().step(3, budget=1) == (3, 1)
    assert ledger.hooks["a seam"].calls == 0
    with pytest.raises(HostError):
        host().step(-1)
    assert ledger.hooks["a seam"].calls == 0


def fail(*_: object) -> None:
    raise RuntimeError("a fault of ours")


def test_before_after_and_settle_see_the_call_in_order(host: type[Any]) -> None:
    order: list[tuple[Any, ...]] = []
    ledger = installed(
        around(
            before=lambda observer, self, args, kwargs: order.append(("before", observer, self, args, kwargs)),
            after=lambda _observer, _self, args, kwargs, result: order.append(("after", args, kwargs, result)),
            settle=lambda observer, result: order.append(("settle", observer, result)),
        )
    )
    observer = Told()
    engine = observed(host(), observer)
    assert engine.step(4, budget=2) == (4, 2)
    assert order == [
        ("before", observer, engine, (4,), {"budget": 2}),
        ("after", (4,), {"budget": 2}, (4, 2)),
        ("settle", observer, (4, 2)),
    ]
    assert ledger.hooks["a seam"].calls == 2


@pytest.mark.parametrize("side", ["before", "after"])
def test_our_faults_do_not_change_what_the_host_does_and_end_after_some(host: type[Any], side: str) -> None:
    ledger = installed(around(**{side: fail}))
    engine = observed(host(), Told())
    assert [engine.step(n) for n in range(40)] == [(n, 7) for n in range(40)]
    hook = ledger.hooks["a seam"]
    assert (hook.calls, hook.faults, hook.disabled) == (MAX_FAULTS, MAX_FAULTS, True)


def test_what_settles_a_result_runs_even_if_the_hook_is_off(host: type[Any]) -> None:
    settled: list[Any] = []
    ledger = installed(around(after=fail, settle=lambda _, result: settled.append(result)))
    engine = observed(host(), Told())
    for number in range(MAX_FAULTS + 4):
        engine.step(number)
    assert ledger.hooks["a seam"].disabled
    assert settled == [(number, 7) for number in range(MAX_FAULTS + 4)]


def test_a_native_error_is_told_once_and_raised_unchanged(host: type[Any]) -> None:
    ledger = installed(around(after=fail, settle=fail))
    observer = Told()
    with pytest.raises(HostError, match="negative") as raised:
        observed(host(), observer).step(-1)
    assert observer.calls == [("on_native_error", ("a seam", "HostError"))]
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None
    assert (ledger.hooks["a seam"].calls, ledger.hooks["a seam"].faults) == (1, 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_process_is_told_and_passes(host: type[Any], error: type[BaseException]) -> None:
    def ending(self: Any) -> None:
        raise error

    host.step = ending
    installed(around())
    observer = Told()
    with pytest.raises(error):
        observed(host(), observer).step()
    assert observer.calls == [("on_native_error", ("a seam", error.__name__))]


def test_an_observer_that_fails_when_told_does_not_hide_the_error(host: type[Any]) -> None:
    ledger = installed(around())
    with pytest.raises(HostError):
        observed(host(), Told(on_native_error=fail)).step(-1)
    assert ledger.hooks["a seam"].faults == 1


@pytest.mark.parametrize("error", [ViolationError("text", "reason"), ConfigurationError("path", "message")])
def test_an_error_that_is_meant_stops_the_host_before_or_after_it_ran(host: type[Any], error: Exception) -> None:
    ran: list[int] = []
    original = host.step
    host.step = lambda self, n: (ran.append(n), original(self, n))[1]

    def deliberate(*_: object) -> None:
        raise error

    ledger = installed(around(before=deliberate))
    observer = Told()
    with pytest.raises(type(error)) as raised:
        observed(host(), observer).step(1)
    assert raised.value is error
    assert ran == []
    ledger.uninstall_all()
    installed(around(after=deliberate))
    with pytest.raises(type(error)):
        observed(host(), observer).step(2)
    assert ran == [2]
    assert observer.calls == []


def test_our_own_error_from_further_down_is_not_told_as_a_native_one(host: type[Any]) -> None:
    def violated(self: Any) -> None:
        raise ViolationError("text", "reason")

    host.step = violated
    installed(around())
    observer = Told()
    with pytest.raises(ViolationError):
        observed(host(), observer).step()
    assert observer.calls == []


def test_two_seams_over_one_method_come_off_in_any_order(host: type[Any]) -> None:
    """Two ledgers, as two plugins would have them."""
    original = host.__dict__["step"]
    first, second = Ledger(), Ledger()
    first.install(seam(around()))
    second.install(seam(around()))
    first.uninstall_all()
    second.uninstall_all()
    first.uninstall_all()
    assert host.__dict__["step"] is original


def test_a_carrier_is_where_a_host_object_has_its_observer(host: type[Any]) -> None:
    heard: list[Any] = []
    installed(around(after=lambda observer, *_: heard.append(observer), carrier="_reader"))
    engine = observed(host(), "the observer")
    engine.step(1)
    assert heard == []
    engine._reader = "the reader"
    engine.step(1)
    assert heard == ["the reader"]


# Scopes ---------------------------------------------------------------------------------------------------------------


class Scopes:
    """A reader whose scope is entered and left, and that may fail at it."""

    def __init__(self, *, fails: str = "") -> None:
        self.scope: Any = "nobody"
        self.native: list[tuple[str, str]] = []
        self._fails = fails

    def on_native_error(self, boundary: str, error_type: str) -> None:
        self.native.append((boundary, error_type))

    @staticmethod
    def enter(reader: Scopes, host: Any, args: Any, kwargs: Any) -> Any:
        if reader._fails == "enter":
            raise RuntimeError("a fault of ours")
        before, reader.scope = reader.scope, (host, args, kwargs)
        return before

    @staticmethod
    def leave(reader: Scopes, before: Any) -> None:
        reader.scope = before
        if reader._fails == "leave":
            raise RuntimeError("a fault of ours")


def scoped_host(host: type[Any], reader: Scopes, inside: list[Any]) -> tuple[Any, Ledger]:
    original = host.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        inside.append(reader.scope)
        return original(self, *args, **kwargs)

    host.step = step
    ledger = installed(scoped(Scopes.enter, Scopes.leave, carrier="_reader"))
    engine = host()
    engine._reader = reader
    return engine, ledger


def test_what_is_called_inside_knows_on_whose_behalf_and_afterwards_nobody_is(host: type[Any]) -> None:
    reader, inside = Scopes(), list[Any]()
    engine, ledger = scoped_host(host, reader, inside)
    assert engine.step(3, budget=2) == (3, 2)
    assert inside == [(engine, (3,), {"budget": 2})]
    assert reader.scope == "nobody"
    assert (ledger.hooks["a seam"].calls, ledger.hooks["a seam"].faults) == (1, 0)


def test_a_scope_ends_with_an_error_of_the_host_which_is_told_and_raised(host: type[Any]) -> None:
    reader, inside = Scopes(), list[Any]()
    engine, _ = scoped_host(host, reader, inside)
    with pytest.raises(HostError, match="negative"):
        engine.step(-1)
    assert reader.scope == "nobody"
    assert reader.native == [("a seam", "HostError")]


@pytest.mark.parametrize("fails", ["enter", "leave"])
def test_a_scope_that_cannot_be_entered_or_left_does_not_hurt_the_host_and_ends_after_some(
    host: type[Any], fails: str
) -> None:
    reader, inside = Scopes(fails=fails), list[Any]()
    engine, ledger = scoped_host(host, reader, inside)
    assert [engine.step(n) for n in range(20)] == [(n, 7) for n in range(20)]
    hook = ledger.hooks["a seam"]
    assert (hook.calls, hook.faults, hook.disabled) == (MAX_FAULTS, MAX_FAULTS, True)
    assert reader.scope == "nobody"
    assert inside[-1] == "nobody"


def test_a_scope_that_was_not_entered_is_not_left(host: type[Any]) -> None:
    """Whoever called us is still inside of theirs."""
    reader, inside = Scopes(fails="enter"), list[Any]()
    engine, _ = scoped_host(host, reader, inside)
    reader.scope = "somebody"
    engine.step(1)
    assert (inside, reader.scope) == (["somebody"], "somebody")


def test_a_host_without_a_reader_has_no_scope(host: type[Any]) -> None:
    ledger = installed(scoped(fail, fail, carrier="_reader"))
    assert host().step(3) == (3, 7)
    assert ledger.hooks["a seam"].calls == 0


# Lists ----------------------------------------------------------------------------------------------------------------


def listing_host(host: type[Any], after: Any) -> tuple[Any, Ledger]:
    def take(self: Any, items: Any, more: int = 0, *, most: int = 9) -> Any:
        if more < 0:
            raise HostError("negative")
        return [*items, more, most]

    host.step = take
    ledger = installed(listing(after, carrier="_reader"))
    engine = host()
    engine._reader = Told()
    return engine, ledger


def test_what_can_be_gone_through_once_reaches_both_complete(host: type[Any]) -> None:
    heard: list[Any] = []
    engine, _ = listing_host(host, lambda _reader, _host, items, kwargs: heard.append((items, kwargs)))
    assert engine.step((n for n in (1, 2)), 3) == [1, 2, 3, 9]
    assert engine.step(reversed([1, 2]), most=4) == [2, 1, 0, 4]
    assert engine.step(items=iter([5]), more=6) == [5, 6, 9]
    assert heard == [([1, 2], {}), ([2, 1], {"most": 4}), ([5], {"more": 6})]


def test_a_wrong_call_is_the_hosts_to_refuse(host: type[Any]) -> None:
    engine, ledger = listing_host(host, fail)
    with pytest.raises(TypeError, match="items"):
        engine.step(most=1)
    assert ledger.hooks["a seam"].faults == 0


def test_a_list_is_passed_on_as_it_is_where_nobody_reads(host: type[Any]) -> None:
    engine, ledger = listing_host(host, fail)
    del engine._reader
    assert engine.step(iter([1])) == [1, 0, 9]
    assert ledger.hooks["a seam"].calls == 0


def test_a_fault_about_a_list_does_not_hurt_the_host_and_ends_after_some(host: type[Any]) -> None:
    engine, ledger = listing_host(host, fail)
    assert [engine.step(iter([n])) for n in range(20)] == [[n, 0, 9] for n in range(20)]
    hook = ledger.hooks["a seam"]
    assert (hook.calls, hook.faults, hook.disabled) == (MAX_FAULTS, MAX_FAULTS, True)


def test_an_error_of_the_host_about_a_list_is_told_once(host: type[Any]) -> None:
    engine, _ = listing_host(host, fail)
    with pytest.raises(HostError, match="negative"):
        engine.step(iter([1]), -1)
    assert engine._reader.calls == [("on_native_error", ("a seam", "HostError"))]


# Constructors ---------------------------------------------------------------------------------------------------------


def test_a_constructor_is_seen_from_both_sides(host: type[Any]) -> None:
    order: list[tuple[Any, ...]] = []
    ledger = installed(
        creation(
            before=lambda self, args, kwargs: order.append((hasattr(self, "config"), args, kwargs)),
            after=lambda self, args, kwargs, result: order.append((self.config, args, kwargs, result)),
        ),
        "Engine.__init__",
    )
    host("c")
    host(config="k")
    assert order == [
        (False, ("c",), {}),
        ("c", ("c",), {}, None),
        (False, (), {"config": "k"}),
        ("k", (), {"config": "k"}, None),
    ]
    assert ledger.hooks["a seam"].calls == 4


def test_a_constructor_is_not_hurt_by_our_faults(host: type[Any]) -> None:
    ledger = installed(creation(before=fail, after=fail), "Engine.__init__")
    assert [host(number).config for number in range(30)] == list(range(30))
    assert ledger.hooks["a seam"].disabled


def test_a_constructor_with_nothing_to_do_is_not_counted(host: type[Any]) -> None:
    ledger = installed(creation(), "Engine.__init__")
    assert host(1).config == 1
    assert ledger.hooks["a seam"].calls == 0


def test_a_wrong_setting_stops_a_constructor(host: type[Any]) -> None:
    def wrong(*_: object) -> None:
        raise ConfigurationError("additional_config.kv_trace.action", "'warn' is not one of 'log'")

    installed(creation(before=wrong), "Engine.__init__")
    with pytest.raises(ConfigurationError, match=r"additional_config\.kv_trace\.action"):
        host()
