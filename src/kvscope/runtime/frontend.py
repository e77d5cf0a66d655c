"""Observes the front end: which engine requests serve the id that a client sees."""

from __future__ import annotations

from ..facts.requests import Admission
from .run import Run


class FrontendRecorder:
    """Records admissions. Judges nothing."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_admission(self, admission: Admission) -> None:
        run = self._run
        run.open()
        run.stream.put("frontend_admit", admission, component="frontend", boundary="frontend_admit")

    def on_native_error(self, boundary: str, error_type: str) -> None:
        self._run.native_error(error_type, component="frontend", boundary=boundary)

    def on_shutdown(self) -> None:
        self._run.close()
