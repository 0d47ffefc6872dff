"""Outstanding calls (sent and not answered) of each worker and each mesh."""

from __future__ import annotations

from collections.abc import Mapping

MAX_QUEUED = 2  # one that runs, one behind it


class DeviceLoad:
    """Outstanding calls by rank; asking for a whole mesh takes constant time.

    Args:
        meshes: call name -> global ranks.
        n_ranks: number of workers.
    """

    def __init__(self, meshes: Mapping[str, tuple[int, ...]], n_ranks: int) -> None:
        distinct = list(dict.fromkeys(meshes.values()))
        self._mesh_of = {name: distinct.index(ranks) for name, ranks in meshes.items()}
        self._meshes_with: list[list[int]] = [[] for _ in range(n_ranks)]
        for mesh, ranks in enumerate(distinct):
            for rank in ranks:
                self._meshes_with[rank].append(mesh)
        self._depth = [0] * n_ranks
        # _n_deeper[mesh][d] = ranks of the mesh with more than d outstanding calls.
        self._n_deeper = [[0] * MAX_QUEUED for _ in distinct]
        sets = [frozenset(ranks) for ranks in distinct]
        self._overlaps = [[not a.isdisjoint(b) for b in sets] for a in sets]

    def add(self, rank: int) -> None:
        """Note that a call was sent to `rank`."""
        depth = self._depth[rank]
        self._depth[rank] = depth + 1
        for mesh in self._meshes_with[rank]:
            self._n_deeper[mesh][depth] += 1

    def remove(self, rank: int) -> None:
        """Note that `rank` answered a call."""
        depth = self._depth[rank] - 1
        self._depth[rank] = depth
        for mesh in self._meshes_with[rank]:
            self._n_deeper[mesh][depth] -= 1

    def of_rank(self, rank: int) -> int:
        """Return the number of outstanding calls of one rank."""
        return self._depth[rank]

    def of_call(self, name: str) -> int:
        """Return the number of outstanding calls of the busiest rank of the call's mesh."""
        return sum(n > 0 for n in self._n_deeper[self._mesh_of[name]])

    def share_devices(self, name: str, other: str) -> bool:
        """Return True if two calls have a device in common."""
        return self._overlaps[self._mesh_of[name]][self._mesh_of[other]]
