"""The front end's admission: which engine request serves the id that a client sees.

Source: ``OutputProcessor.add_request`` (``vllm/v1/engine/output_processor.py``, 0.32); the samples of one ``n > 1``
request pass one by one, with ``request_index``.
"""

from __future__ import annotations

from typing import Any

from ..facts.requests import Admission


def after_add_request(observer: Any, processor: Any, args: Any, kwargs: Any, result: Any) -> None:
    request = args[0] if args else kwargs["request"]
    index = args[3] if len(args) > 3 else kwargs.get("request_index", 0)
    observer.on_admission(
        Admission(
            client_request_id=request.external_req_id or request.request_id,
            request_id=request.request_id,
            child_index=index,
        )
    )
