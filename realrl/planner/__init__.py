"""Plans for runs: what is asked for, a search for the best one, and its confirmation by the real scheduler."""
