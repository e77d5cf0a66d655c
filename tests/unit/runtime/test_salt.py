from __future__ import annotations

import subprocess
import sys

import pytest

from kvscope.runtime.salt import SALT_VARIABLE, run_salt


def test_a_run_has_one_salt_and_hands_it_on() -> None:
    environ: dict[str, str] = {}
    salt = run_salt(environ)
    assert len(salt) == 32
    assert run_salt(environ) == salt
    assert run_salt(dict(environ)) == salt


def test_two_runs_have_two_salts() -> None:
    assert run_salt({}) != run_salt({})


@pytest.mark.parametrize("damaged", ["", "no hex", "abcd", "00" * 31, "00" * 33])
def test_a_salt_that_is_damaged_is_made_anew(damaged: str) -> None:
    environ = {SALT_VARIABLE: damaged}
    salt = run_salt(environ)
    assert len(salt) == 32
    assert environ[SALT_VARIABLE] == salt.hex()


def test_a_started_process_has_the_salt_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SALT_VARIABLE, raising=False)
    salt = run_salt()
    code = "from kvscope.runtime.salt import run_salt; print(run_salt().hex())"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == salt.hex()
