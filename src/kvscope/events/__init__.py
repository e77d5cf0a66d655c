"""Station 5, wherever facts and findings become records. In: facts, findings. Out: the published record."""
