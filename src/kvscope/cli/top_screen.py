"""The live screen of ``kvscope top``, by textual: the sections of a view, drawn anew after each look.

A look runs in a thread, since an exporter may not answer at once and a trace may be long; there is never more than one.
"""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import VerticalScroll
from textual.widgets import Footer, Static

from kvscope.cli.screen import STYLES
from kvscope.cli.top_sources import Source
from kvscope.errors import KvscopeError
from kvscope.metrics.view import View
from kvscope.reports.live import Section, headline, sections
from kvscope.reports.printable import clean

__all__ = ["TopScreen"]


class TopScreen(App[None]):
    """Shows what ``source`` says, every ``every_s`` seconds, until somebody quits."""

    TITLE = "kvscope top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #status { height: 1; padding: 0 1; background: $panel; }
    #status.failed { background: $error; color: $text; }
    .section { border: round $panel-lighten-2; border-title-color: $accent; padding: 0 1; height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "quit"),
        ("space", "pause", "pause"),
        ("r", "again", "look now"),
    ]

    def __init__(self, source: Source, *, every_s: float) -> None:
        super().__init__()
        self._source = source
        self._every_s = every_s
        self._is_looking = False
        self._is_paused = False
        self._view: View | None = None

    def compose(self) -> ComposeResult:
        """The status line, room for the sections, and the keys."""
        yield Static("looking …", id="status", markup=False)
        yield VerticalScroll(id="sections")
        yield Footer()

    def on_mount(self) -> None:
        """Begin to look."""
        self.set_interval(self._every_s, self._tick)
        self._look()

    def on_resize(self) -> None:
        """Lines are made for a width."""
        if self._view is not None:
            self._draw(self._view)

    def action_pause(self) -> None:
        """Stand still, or go on."""
        self._is_paused = not self._is_paused
        self._say("paused; space goes on" if self._is_paused else "going on")

    def action_again(self) -> None:
        """Look at once."""
        self._look()

    def _tick(self) -> None:
        if not self._is_paused:
            self._look()

    def _look(self) -> None:
        if not self._is_looking:
            self._is_looking = True
            self._ask()

    @work(thread=True, exit_on_error=False)
    def _ask(self) -> None:
        try:
            view = self._source.look()
        except (KvscopeError, OSError) as error:
            self.call_from_thread(self._failed, str(error))
        else:
            self.call_from_thread(self._draw, view)
        finally:
            self._is_looking = False

    def _failed(self, text: str) -> None:
        """What was drawn last stays, and it is said that it is old."""
        self._say(text, is_failed=True)

    def _draw(self, view: View) -> None:
        self._view = view
        self._say(headline(view))
        room = self.query_one("#sections", VerticalScroll)
        wanted = sections(view, max(self.size.width - 6, 40))
        shown = {str(widget.id): widget for widget in room.query(Static)}
        for name in shown.keys() - {section.name for section in wanted}:
            shown[name].remove()
        for section in wanted:
            if section.name not in shown:
                room.mount(self._made(section))
            else:
                self._fill(shown[section.name], section)

    def _made(self, section: Section) -> Static:
        widget = Static(id=section.name, classes="section", markup=False)
        self._fill(widget, section)
        return widget

    def _fill(self, widget: Static, section: Section) -> None:
        widget.border_title = section.heading
        lines = [Text(clean(text), style=STYLES.get(style, "")) for style, text in section.lines]
        widget.update(Text("\n").join(lines))

    def _say(self, text: str, *, is_failed: bool = False) -> None:
        status = self.query_one("#status", Static)
        status.set_class(is_failed, "failed")
        status.update(Text(clean(text), no_wrap=True, overflow="ellipsis"))
