"""Station 3, in EngineCore, in workers and offline. In: facts. Out: our own picture, built from facts alone."""
