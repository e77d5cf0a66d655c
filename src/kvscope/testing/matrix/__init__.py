"""The feature matrix: what vLLM can do, with both model runners, with kvscope off and on.

    python -m kvscope.testing.matrix --list
    python -m kvscope.testing.matrix --only gemma3 --runner v1

A *cell* is one feature with one runner. It serves the same requests twice, with kvscope off and with trace and guard on
under action ``raise``, and is sound when the tokens are the same, nothing is found, live or by ``kvscope check``, every
row is audited, every request can be followed through each of its steps, and the feature really took place.

``features`` is the table, ``traffic`` what is asked of an engine, ``cell`` runs one, ``verdict`` judges its trace, and
``__main__`` runs all of them, each in a process of its own.
"""
