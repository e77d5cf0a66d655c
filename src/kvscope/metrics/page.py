"""The live page: one document with everything in it, so that it fetches nothing but the view, and from nobody else.

The chart library uPlot stands beside its licence in ``assets/uplot``; the rest is ``assets/live.*``.
"""

from __future__ import annotations

import functools
from importlib import resources

__all__ = ["HTML", "PAGE_HEADERS", "VIEW_PATH", "page"]

HTML = "text/html; charset=utf-8"
VIEW_PATH = "/view.json"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

_PARTS = {
    "/*uplot.css*/": "uplot/uPlot.min.css",
    "/*live.css*/": "live.css",
    "/*uplot.js*/": "uplot/uPlot.iife.min.js",
    "/*live.js*/": "live.js",
    "/*uplot.licence*/": "uplot/LICENSE",
}


@functools.cache
def page() -> bytes:
    """The whole page."""
    assets = resources.files("kvscope.metrics") / "assets"
    document = (assets / "live.html").read_text(encoding="utf-8")
    for mark, name in _PARTS.items():
        document = document.replace(mark, (assets / name).read_text(encoding="utf-8"))
    return document.replace("/*view.path*/", VIEW_PATH).encode()
