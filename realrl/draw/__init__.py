"""Pictures of a graph: see `realrl.draw.picture`."""
