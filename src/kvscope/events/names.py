"""How request ids stand in records: the one place where ``kv_output.request_ids`` is applied."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

from kvscope.config import RequestIds
from kvscope.events.envelope import RequestId

_REMEMBERED = 65536


class RequestNames:
    """Turns a request id into what may be written.

    ``hashed`` is a keyed BLAKE2b of 16 hex digits. ``salt`` is the run's secret: the same in every process of the run,
    or their records could not be joined, and never written anywhere, or the ids could be guessed from the records.
    """

    def __init__(self, mode: RequestIds = "plain", salt: bytes = b"") -> None:
        if mode == "hashed" and not 16 <= len(salt) <= 64:
            raise ValueError("hashed request ids need a salt of 16 to 64 bytes")
        self.mode = mode
        self._salt = salt
        self._known: dict[str, str] = {}

    def __call__(self, request_id: str) -> RequestId:
        if self.mode == "plain":
            return request_id if request_id.isascii() else _encodable(request_id)
        if self.mode == "omitted":
            return None
        name = self._known.get(request_id)
        if name is None:
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            name = hashlib.blake2b(
                request_id.encode("utf-8", "surrogatepass"), digest_size=8, key=self._salt
            ).hexdigest()
            self._known[request_id] = name
        return name

    def of(self, request_ids: Collection[str]) -> list[RequestId]:
        """All of them, in their order."""
        if self.mode == "plain" and "".join(request_ids).isascii():
            return list(request_ids)
        return [self(request_id) for request_id in request_ids]


def _encodable(request_id: str) -> str:
    """JSON of a client can name half of a surrogate pair, which no JSON of ours could hold."""
    return request_id.encode("utf-8", "backslashreplace").decode()


PLAIN = RequestNames()


def known(name: RequestId) -> str:
    """The name in a record, for a reader that cannot go on without it.

    Raises:
        ValueError: the trace was written without request ids.
    """
    if name is None:
        raise ValueError('this trace was written with request_ids = "omitted": requests cannot be told apart')
    return name
