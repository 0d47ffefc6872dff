"""Search for the plan with the shortest period: candidates, a fast model of the scheduler, bounds and their proof."""
