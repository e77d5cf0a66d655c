"""Station 1, inside vLLM. In: calls of the host at the seams. Out: facts, handed to the host object's observer."""
