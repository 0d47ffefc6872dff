"""realrl: a declarative dataflow-graph runtime for RLHF."""
