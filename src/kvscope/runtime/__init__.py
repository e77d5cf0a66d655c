"""The wiring, in every process of a run. In: facts from the boundary. Out: state, judged findings, records in sinks."""
