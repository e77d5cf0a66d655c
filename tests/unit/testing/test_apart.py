"""A module in a process of its own, without an engine: how it ended is said, and nothing of it is left."""

from pathlib import Path

import psutil
import pytest

from kvscope.testing.demo.apart import EngineFailedError, run_module

SPAWNS = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"


def test_what_it_prints_goes_to_the_log(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("[1]", encoding="utf-8")
    run_module("json.tool", ["--compact", str(tmp_path / "in.json")], what="it", log=tmp_path / "log", deadline_s=30)
    assert (tmp_path / "log").read_text(encoding="utf-8") == "[1]\n"


def test_a_bad_end_is_an_error_with_the_end_of_the_log(tmp_path: Path) -> None:
    with pytest.raises(EngineFailedError, match=r"^it ended with exit code \d+\n(.*\n)*.*not there") as caught:
        run_module("json.tool", [str(tmp_path / "not there")], what="it", log=tmp_path / "log", deadline_s=30)
    assert len(str(caught.value).splitlines()) <= 11


@pytest.mark.parametrize(("hangs", "error"), [("", None), ("\nimport time; time.sleep(60)", "did not end in 1 s")])
def test_neither_it_nor_what_it_started_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: str, error: str | None
) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNS + hangs, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if error is None:
        run_module("spawning", [], what="it", log=tmp_path / "log", deadline_s=30)
    else:
        with pytest.raises(EngineFailedError, match=error):
            run_module("spawning", [], what="it", log=tmp_path / "log", deadline_s=1)
    left = [p for p in psutil.process_iter() if _environment(p).get("PYTHONPATH") == str(tmp_path)]
    _, alive = psutil.wait_procs(left, timeout=5)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
