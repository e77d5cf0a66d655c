"""What a demo says while it runs: numbered stages, commands run for the reader, bars while one waits."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from itertools import dropwhile, takewhile
from pathlib import Path
from time import monotonic

from kvscope.cli.screen import Line, show, shown, typed, wrapped


class Narration:
    """The text of one demo, none with `quiet`. `seconds` says how long each stage took."""

    def __init__(self, stages: int, *, quiet: bool) -> None:
        self._stages, self._quiet, self._announced = stages, quiet, 0
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(self, name: str, title: str, text: str) -> Iterator[None]:
        """A stage, timed under its name unless it fails."""
        self.announce(title, text)
        self.say([("", "")])
        began = monotonic()
        yield
        self.seconds[name] = monotonic() - began

    def announce(self, title: str, text: str) -> None:
        """The heading of a stage; one that is left out has no more than this."""
        self._announced += 1
        self.say([("", ""), ("label", f"[{self._announced}/{self._stages}] {title}"), *_paragraph(text)])

    def say(self, lines: list[Line]) -> None:
        if not self._quiet:
            show(lines)
            sys.stdout.flush()  # in a pipe, too, the stage that runs is the last one that was announced

    def kvscope(self, verb: str, path: Path, *, part: str | None = None) -> int:
        """Run another verb on a trace as a person would, and give its exit code. With `part`, the lines from the one
        that begins with it to the next empty one are shown.
        """
        from kvscope.cli import INTERRUPTED
        from kvscope.cli.app import run

        arguments = [verb, shown(path)]
        cut = f" | sed -n '/^{part}/,/^$/p'" if part else ""
        self.say([("dim", f"$ {typed()} {shlex.join(arguments)}{cut}")])
        if self._quiet or part:
            with contextlib.redirect_stdout(io.StringIO()) as caught:
                code = run([*arguments, "--json"] if self._quiet else arguments)
            self.say([("", line) for line in part_of(caught.getvalue(), part)] if part else [])
        else:
            code = run(arguments)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        return code

    @contextlib.contextmanager
    def waiting(self, what: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        """A bar on stderr while something takes its time; the value is called for each thing that is done."""
        if self._quiet or not (sys.stderr.isatty() and sys.stdout.isatty()):
            yield lambda: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = [SpinnerColumn(), TextColumn("{task.description}")]
        columns += [BarColumn(), MofNCompleteColumn()] if total is not None else []
        with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(what, total=total)
            yield lambda: progress.advance(task)


def part_of(text: str, beginning: str) -> list[str]:
    """The lines of a text from the one with this beginning to the next empty one, which is no longer a part of it."""
    begun = dropwhile(lambda line: not line.startswith(beginning), text.splitlines())
    return list(takewhile(bool, begun))


def settings_lines(config: dict[str, dict[str, object]]) -> list[Line]:
    """The configuration, one key a line, as it can be typed."""
    lines = [
        f"    {json.dumps(key)}: {json.dumps({k: shown(Path(str(v))) if k == 'dir' else v for k, v in fields.items()})}"
        for key, fields in config.items()
    ]
    return [("dim", line) for line in [*(f"{line}," for line in lines[:-1]), lines[-1]]]


def _paragraph(text: str) -> list[Line]:
    return [(style, line.strip()) for style, line in wrapped(text)]
