"""Pages about runs that were done, or are going on: curves, samples, times, settings."""
