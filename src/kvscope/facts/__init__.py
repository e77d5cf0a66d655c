"""Station 2, in every process. In: what an adapter saw in vLLM. Out: small immutable records without any host type."""
