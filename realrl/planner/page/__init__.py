"""One page about a plan: what every device does when, its memory, the graph, the other plans."""
