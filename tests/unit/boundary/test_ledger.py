"""Installing and uninstalling are twins; what cannot be wrapped is refused with a reason."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from kvscope.boundary.ledger import MAX_FAULTS, Hook, Ledger
from kvscope.boundary.wrapping import around, creation
from kvscope.errors import ConfigurationError, ViolationError
from unit.boundary.fakes import MODULE, make_host, seam


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    return make_host(monkeypatch)


@pytest.fixture
def ledger() -> Ledger:
    return Ledger()


def test_uninstalling_leaves_the_very_object_that_was_there(host: type[Any], ledger: Ledger) -> None:
    original = host.__dict__["step"]
    assert ledger.install(seam(around()))
    assert host.__dict__["step"] is not original
    ledger.uninstall("a seam")
    assert host.__dict__["step"] is original
    assert ledger.installed == {}


def test_installing_again_changes_nothing(host: type[Any], ledger: Ledger) -> None:
    one = seam(around())
    assert ledger.install(one)
    wrapper, entry = host.__dict__["step"], ledger.installed["a seam"]
    assert ledger.install(one)
    assert ledger.install(seam(around()))
    assert host.__dict__["step"] is wrapper
    assert ledger.installed["a seam"] is entry


def test_uninstalling_what_is_not_installed_changes_nothing(host: type[Any], ledger: Ledger) -> None:
    original = host.__dict__["step"]
    ledger.uninstall("a seam")
    ledger.install(seam(around()))
    ledger.uninstall("a seam")
    ledger.uninstall("a seam")
    assert host.__dict__["step"] is original


def test_all_are_uninstalled_at_once_and_can_be_installed_again(host: type[Any], ledger: Ledger) -> None:
    before = dict(vars(host))
    seams = [seam(around(), name="step"), seam(creation(), "Engine.__init__", name="create")]
    for _ in range(2):
        assert all(ledger.install(one) for one in seams)
        assert sorted(ledger.installed) == ["create", "step"]
        ledger.uninstall_all()
        assert all(vars(host)[name] is value for name, value in before.items())


def test_numbers_go_on_when_a_seam_is_installed_again(host: type[Any], ledger: Ledger) -> None:
    ledger.install(seam(creation(before=lambda *_: None), "Engine.__init__"))
    host()
    ledger.uninstall_all()
    ledger.install(seam(creation(before=lambda *_: None), "Engine.__init__"))
    host()
    assert ledger.hooks["a seam"].calls == 2


def test_what_another_tool_has_wrapped_over_stays_and_says_so(host: type[Any], ledger: Ledger) -> None:
    ledger.install(seam(around()))
    ours = host.__dict__["step"]

    def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **kwargs)

    host.step = theirs
    ledger.uninstall("a seam")
    assert host.__dict__["step"] is theirs
    assert "another tool" in ledger.absent["a seam"]
    assert host().step(1) == (1, 7)


def test_once_the_other_tool_is_gone_ours_can_go_too(host: type[Any], ledger: Ledger) -> None:
    original = host.__dict__["step"]
    ledger.install(seam(around()))
    ours = host.__dict__["step"]
    host.step = lambda _: None
    ledger.uninstall_all()
    host.step = ours
    ledger.uninstall_all()
    assert host.__dict__["step"] is original


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("Missing.step", "has no class Missing"),
        ("NOT_A_CLASS.step", "has no class NOT_A_CLASS"),
        ("Engine.stride", "Engine has no method stride of its own"),
        ("Engine.size", "Engine has no method size of its own"),
        ("Child.step", "Child has no method step of its own"),
    ],
)
def test_a_target_that_is_not_there_is_refused(host: type[Any], ledger: Ledger, target: str, reason: str) -> None:
    before = dict(vars(host))
    assert not ledger.install(seam(around(), target))
    assert reason in ledger.absent["a seam"]
    assert dict(vars(host)) == before
    assert ledger.installed == {}


def test_a_target_without_the_parameter_that_is_relied_on_is_refused(host: type[Any], ledger: Ledger) -> None:
    assert not ledger.install(seam(around(), needs=("tokens", "lora", "seed")))
    assert ledger.absent["a seam"] == "Engine.step has no parameter lora, seed"
    assert ledger.install(seam(around(), needs=("tokens", "budget")))
    assert ledger.absent == {}


def test_a_module_that_does_not_exist_is_refused(ledger: Ledger) -> None:
    assert not ledger.install(seam(around(), module="no_such_module_anywhere"))
    assert ledger.absent["a seam"] == "its module cannot be imported (ModuleNotFoundError)"


def test_a_module_that_fails_on_import_is_refused(
    ledger: Ledger, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_host_module.py").write_text("raise ZeroDivisionError")
    monkeypatch.syspath_prepend(tmp_path)
    assert not ledger.install(seam(around(), module="broken_host_module"))
    assert ledger.absent["a seam"] == "its module cannot be imported (ZeroDivisionError)"


def test_a_bootstrap_seam_imports_no_module(ledger: Ledger, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sleeping_host_module.py").write_text("class Engine:\n    def step(self): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    sleeping = seam(around(), module="sleeping_host_module", when_loaded=True)
    assert not ledger.install(sleeping)
    assert "sleeping_host_module" not in sys.modules
    with pytest.raises(LookupError, match="not loaded"):
        sleeping.resolve(load=False)
    assert ledger.install(sleeping, load=True)
    assert sys.modules.pop("sleeping_host_module").Engine.__dict__["step"].__wrapped__


def test_a_seam_says_where_it_is(host: type[Any]) -> None:
    assert seam(around()).target == f"{MODULE}:Engine.step"


# Hooks ----------------------------------------------------------------------------------------------------------------


def test_a_hook_counts_calls_and_its_own_time() -> None:
    hook = Hook("h")
    done: list[int] = []
    for number in range(5):
        hook.run(done.append, number)
    assert done == [0, 1, 2, 3, 4]
    assert (hook.calls, hook.faults, hook.disabled) == (5, 0, False)
    assert hook.time_ns > 0


def faulty(*_: object) -> None:
    raise RuntimeError("a fault of ours")


def test_faults_are_swallowed_and_the_hook_is_off_after_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    hook = Hook("h")
    for _ in range(MAX_FAULTS - 1):
        hook.run(faulty)
    assert (hook.calls, hook.faults, hook.disabled) == (MAX_FAULTS - 1, MAX_FAULTS - 1, False)
    hook.run(faulty)
    hook.run(faulty)
    assert (hook.calls, hook.faults, hook.disabled) == (MAX_FAULTS, MAX_FAULTS, True)
    done: list[int] = []
    hook.run(done.append, 1)
    assert done == []
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "kvscope: hook h failed (RuntimeError); it is switched off after 16 faults",
        "kvscope: hook h failed (RuntimeError); it is switched off",
    ]


@pytest.mark.parametrize("error", [ViolationError("text", "reason"), ConfigurationError("path", "message")])
def test_errors_that_are_meant_pass_and_are_no_fault(error: Exception) -> None:
    hook = Hook("h")

    def deliberate() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        hook.run(deliberate)
    assert raised.value is error
    assert (hook.calls, hook.faults) == (1, 0)


def test_an_interruption_is_no_fault_and_passes() -> None:
    hook = Hook("h")

    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hook.run(interrupted)
    assert (hook.calls, hook.faults) == (1, 0)
