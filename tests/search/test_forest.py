import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.mesh.device_mesh import Cluster, DeviceMesh, legal_meshes
from realrl.search.forest import Forest
from realrl.search.space import mesh_sizes, relation

CLUSTERS = [Cluster(1, 4), Cluster(2, 2), Cluster(3, 1), Cluster(2, 4), Cluster(3, 2), Cluster(2, 6), Cluster(1, 3)]


def relations(spans, node):
    return tuple(relation(a, b, node) for a, b in itertools.permutations(spans, 2))


def arrangements(cluster, sizes):
    """Relations of all forests with meshes of these sizes, in order."""
    states = [(Forest.of(cluster), ())]
    for size in sizes:
        states = [(after, (*vertices, v)) for forest, vertices in states for after, v in forest.placed(size)]
    found = []
    for forest, vertices in states:
        spans = forest.layout()
        assert spans is not None
        placed = [spans[v] for v in vertices]
        for first, end in placed:
            DeviceMesh(cluster, tuple(range(first, end)))  # refuses ranks that are no mesh
        assert relations(placed, cluster.n_devices_per_node) == tuple(
            forest.relation(a, b) for a, b in itertools.permutations(vertices, 2)
        )
        found.append(relations(placed, cluster.n_devices_per_node))
    return found


@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_every_arrangement_of_legal_meshes_once(cluster):
    meshes = list(legal_meshes(cluster))
    for sizes in itertools.product(mesh_sizes(cluster), repeat=3):
        expected = set()
        for chosen in itertools.product(*([m for m in meshes if m.n_devices == size] for size in sizes)):
            pairs = itertools.combinations(chosen, 2)
            if all(not a.overlaps(b) or a.contains(b) or b.contains(a) for a, b in pairs):
                spans = [(mesh.ranks[0], mesh.ranks[-1] + 1) for mesh in chosen]
                expected.add(relations(spans, cluster.n_devices_per_node))
        found = arrangements(cluster, sizes)
        assert set(found) == expected
        assert cluster.n_devices_per_node == 1 or len(found) <= 2 * len(expected)


@given(st.sampled_from(CLUSTERS), st.data())
def test_fixed_places_are_kept_or_there_is_no_layout(cluster, data):
    forest, vertices = Forest.of(cluster), []
    for _ in range(data.draw(st.integers(1, 4))):
        options = [one for size in mesh_sizes(cluster) for one in forest.placed(size)]
        forest, vertex = data.draw(st.sampled_from(options))
        vertices.append(vertex)
    free = forest.layout()
    assert free is not None
    assert forest.layout({v: free[v][0] for v in vertices}) == free
    mesh = data.draw(st.sampled_from(list(legal_meshes(cluster))))
    vertex = data.draw(st.sampled_from(vertices))
    if mesh.n_devices == forest.sizes[vertex]:
        spans = forest.layout({vertex: mesh.ranks[0]})
        assert spans is None or spans[vertex][0] == mesh.ranks[0]
