"""Local search: plans next to a plan."""
