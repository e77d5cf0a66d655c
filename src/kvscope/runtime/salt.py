"""The secret by which ``kv_output.request_ids = "hashed"`` hashes: one a run, in memory and environment only.

The front end makes it and the processes that it starts inherit it; a process that did not get it (another host) makes
its own, so that its ids cannot be joined with the others' but stay as secret. It configures nothing.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import MutableMapping

SALT_VARIABLE = "_KVSCOPE_SALT"
_BYTES = 32


def run_salt(environ: MutableMapping[str, str] | None = None) -> bytes:
    """The salt of this run, made now if there is none yet."""
    environ = os.environ if environ is None else environ
    try:
        salt = bytes.fromhex(environ.get(SALT_VARIABLE, ""))
    except ValueError:
        salt = b""
    if len(salt) != _BYTES:
        salt = secrets.token_bytes(_BYTES)
        environ[SALT_VARIABLE] = salt.hex()
    return salt
