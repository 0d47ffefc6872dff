"""Clusters, device meshes, parallel strategies, allocations, and their text notation."""
