from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys

import pytest

from kvscope import errors
from kvscope.errors import (
    ConfigurationError,
    HostMismatchError,
    KvscopeError,
    RegistrationError,
    UnreadableTraceError,
    ViolationError,
    quoted,
)

LINE = "KV_GUARD reason=write_after_release check=C2 action=raise request=r1 group=0 block=7 slot=112 step=3 trace_id=t"

EVERY_ERROR = [
    ConfigurationError("additional_config.kv_trace", "1 is not an object"),
    ViolationError(LINE, "write_after_release", request="r1", group=0, block=7, step=3),
    ViolationError(LINE, "free_list_damaged"),
    RegistrationError("name: 'mine' does not begin with 'vllm_ascend_', as kv_monitor.prefix has it"),
    UnreadableTraceError("out/engine-0-1.0.jsonl", "no record has a schema"),
    HostMismatchError("Scheduler.schedule", expected="(self)", found="(self, throttle)"),
]


def by_type(error: KvscopeError) -> str:
    return type(error).__name__


@pytest.mark.parametrize("error", EVERY_ERROR, ids=by_type)
def test_every_error_is_caught_by_the_base(error: KvscopeError) -> None:
    with pytest.raises(KvscopeError):
        raise error


@pytest.mark.parametrize(
    ("error", "builtin"), [(ConfigurationError, ValueError), (ViolationError, RuntimeError)], ids=lambda e: e.__name__
)
def test_an_error_that_reaches_the_host_is_also_a_builtin_one(error: type[Exception], builtin: type[Exception]) -> None:
    assert issubclass(error, builtin)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=by_type)
@pytest.mark.parametrize("duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_errors_cross_processes_whole(error: KvscopeError, duplicate: object) -> None:
    assert callable(duplicate)
    arrived = duplicate(error)
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_a_configuration_error_says_path_and_message() -> None:
    error = ConfigurationError("additional_config.kv_trace.action", "'warn' is not one of 'log'")
    assert (error.path, error.message) == ("additional_config.kv_trace.action", "'warn' is not one of 'log'")
    assert str(error) == "additional_config.kv_trace.action: 'warn' is not one of 'log'"


def test_a_violation_carries_the_finding_and_reads_as_its_frozen_line() -> None:
    error = ViolationError(LINE, "write_after_release", request="r1", group=0, block=7, step=3)
    assert str(error) == error.text == LINE
    assert (error.reason, error.request, error.group, error.block, error.step) == ("write_after_release", "r1", 0, 7, 3)


def test_a_violation_leaves_out_what_does_not_apply() -> None:
    error = ViolationError(LINE, "free_list_damaged")
    assert (error.request, error.group, error.block, error.step) == (None, None, None, None)


def test_an_unreadable_trace_names_the_file() -> None:
    error = UnreadableTraceError("a.jsonl", "schema kvscope.trace/9 is newer than this kvscope")
    assert (error.path, error.message) == ("a.jsonl", "schema kvscope.trace/9 is newer than this kvscope")
    assert str(error) == "a.jsonl: schema kvscope.trace/9 is newer than this kvscope"


def test_a_host_mismatch_says_expected_and_found() -> None:
    error = HostMismatchError("Scheduler.schedule", expected="(self)", found="nothing")
    assert (error.seam, error.expected, error.found) == ("Scheduler.schedule", "(self)", "nothing")
    assert str(error) == "Scheduler.schedule: expected (self), found nothing"


def test_the_tree_in_the_docstring_is_the_tree_in_the_code() -> None:
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)}
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"^    [├└─ ]*(\w+Error)\b", errors.__doc__, re.MULTILINE))
    assert defined == drawn == set(errors.__all__) - {"quoted"}
    for name in defined - {"KvscopeError"}:
        assert getattr(errors, name).__bases__[0] is KvscopeError


def test_errors_and_configuration_need_no_host() -> None:
    code = (
        "import sys, kvscope.errors, kvscope.config; "
        "print(sorted({'vllm', 'torch', 'numpy', 'msgspec'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "[]\n"


class Multiline:
    def __repr__(self) -> str:
        return "one\ntwo\u2028three\x1b[31m"


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def nested(depth: int) -> object:
    value: object = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("warn", "'warn'"),
        (None, "None"),
        (1.5, "1.5"),
        ({"a": [1]}, "{'a': [1]}"),
        ("a\nb", r"'a\nb'"),
        ("überraschung 块", "'überraschung 块'"),
        ("\udc80", r"'\udc80'"),
        ("\u202e", r"'\u202e'"),
        (Multiline(), r"one\ntwo\u2028three\x1b[31m"),
    ],
    ids=ascii,
)
def test_a_quoted_value_is_its_printable_repr(value: object, shown: str) -> None:
    assert quoted(value) == shown


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, "\n" * 10**6, 10**300, 10**6000, -(10**6000), list(range(10**5)), nested(10**4), Broken()],
    ids=["text", "newlines", "int", "unprintable int", "negative int", "list", "nested", "broken"],
)
def test_a_quoted_value_is_short_and_one_line(value: object) -> None:
    shown = quoted(value)
    assert 0 < len(shown) <= 80
    assert shown.isprintable()
