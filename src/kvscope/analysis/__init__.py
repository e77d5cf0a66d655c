"""Station 8, offline, never inside vLLM. In: the files of a run. Out: what they hold, judged again by the live rules.

``files`` finds them, ``reader`` merges them, ``replay`` judges them, ``verdict`` says how far that can be trusted.
"""
