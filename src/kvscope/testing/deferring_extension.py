"""For `kv_output.extensions`: whichever process imports it has its workers judged from copies (see `deferral`)."""

from kvscope.testing.deferral import defer_always

defer_always()
