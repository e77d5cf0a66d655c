"""Station 6, beside the sinks. In: what observers count in every process. Out: metric families for whoever asks."""
