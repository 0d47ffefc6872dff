"""Nothing in a picture covers anything else."""

import itertools
import re

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from realrl.draw.geometry import Rect, flow, head, rounded, spread
from realrl.draw.layout import lay_out
from realrl.draw.scene import make_scene
from realrl.errors import GraphError
from realrl.graph.build import StepWait, build_graph
from realrl.graph.mfc import MFCDef, OffloadHook
from realrl.mesh.device_mesh import Cluster
from realrl.mesh.notation import parse_allocation
from tests.graph.examples import DATASET_KEYS, GENERATE, INFERENCE, TRAIN, chain, ppo, seventeen, sft


class Place:
    mesh, strategy = "0:0-7", "d4t2p1"


def drawing_of(mfcs, keys, *, placed=False):
    allocations = {mfc.name: Place() for mfc in mfcs} if placed else None
    return lay_out(make_scene(build_graph(mfcs, keys), "title", allocations))


def points_of(path):
    """Points along SVG path data of the commands M, L, H, C and Q."""
    x = y = 0.0
    for command, numbers in re.findall(r"([MLHCQ])([^MLHCQZ]*)", path):
        n = [float(number) for number in numbers.split()]
        if command == "M":
            x, y = n
            continue
        if command == "H":
            n = [n[0], y]
        controls = [(x, y), *zip(n[::2], n[1::2], strict=True)]
        for i in range(25):
            level, t = controls, i / 24
            while len(level) > 1:
                level = [(a + (c - a) * t, b + (d - b) * t) for (a, b), (c, d) in itertools.pairwise(level)]
            yield level[0]
        x, y = controls[-1]


def inside(point, box, margin=1.5):
    x, y = point
    return box.x + margin < x < box.right - margin and box.y + margin < y < box.bottom - margin


def check(drawing):
    """No two boxes overlap, and no line crosses a box other than the ones that it joins."""
    boxes = {
        **{p.card.name: Rect(p.box.x, p.box.y, p.box.width, p.foot - p.box.y) for p in drawing.cards},
        **{p.pill: p.box for p in drawing.pills},
        **{loop.edge: loop.label for loop in drawing.loops},
    }
    for a, b in itertools.combinations(boxes.values(), 2):
        assert a.right <= b.x or b.right <= a.x or a.bottom <= b.y or b.bottom <= a.y
    bounds = drawing.bounds
    for box in boxes.values():
        assert bounds.x - 0.1 <= box.x
        assert box.right <= bounds.right + 0.1
        assert bounds.y - 0.1 <= box.y
        assert box.bottom <= bounds.bottom + 0.1
    joined = [(branch.path, {branch.pill, branch.pill.producer, branch.consumer}) for branch in drawing.branches]
    joined += [(loop.path, {loop.edge, loop.edge.before, loop.edge.after}) for loop in drawing.loops]
    for path, ends in joined:
        others = [box for name, box in boxes.items() if name not in ends and not isinstance(name, StepWait)]
        for point in points_of(path):
            assert not any(inside(point, box) for box in others)
            assert bounds.y - 0.1 <= point[1] <= bounds.bottom + 0.1


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize(
    ("mfcs", "keys"),
    [
        (ppo(), DATASET_KEYS["ppo"]),
        (sft(), DATASET_KEYS["sft"]),
        (seventeen(), DATASET_KEYS["seventeen"]),
        (chain(9), ["k0"]),
        ([MFCDef("alone", "actor", TRAIN, "x", n_seqs=1)], []),
    ],
    ids=["ppo", "sft", "seventeen", "chain", "alone"],
)
def test_examples(mfcs, keys, placed):
    check(drawing_of(mfcs, keys, placed=placed))


@st.composite
def call_lists(draw):
    """Any acyclic list of calls; at most one call of a role trains."""
    n = draw(st.integers(1, 9))
    trained, mfcs = set(), []
    for i in range(n):
        role = draw(st.sampled_from("abcd"))
        kind = draw(st.sampled_from([GENERATE, INFERENCE, TRAIN]))
        if kind is TRAIN and role in trained:
            kind = INFERENCE
        if kind is TRAIN:
            trained.add(role)
        reads = draw(st.lists(st.sampled_from([f"key_{j}" for j in range(i + 1)]), unique=True, max_size=3))
        hooks = (OffloadHook(),) * draw(st.integers(0, 1))
        mfcs.append(MFCDef(f"call_{i}", role, kind, "x", tuple(reads), (f"key_{i + 1}",), post_hooks=hooks, n_seqs=1))
    return mfcs


@given(call_lists(), st.booleans())
def test_any_graph(mfcs, placed):
    try:
        build_graph(mfcs, ["key_0"])
    except GraphError:  # trainings that leave no order for their readers
        reject()
    check(drawing_of(mfcs, ["key_0"], placed=placed))


def test_ppo_reads_from_left_to_right():
    drawing = drawing_of(ppo(), DATASET_KEYS["ppo"])
    left = {placed.card.name: placed.box.x for placed in drawing.cards}
    assert left[""] < left["actor_gen"] < left["rew_inf"] == left["ref_inf"] == left["critic_inf"]
    assert left["critic_inf"] < left["actor_train"] == left["critic_train"]
    assert len(drawing.pills) == 7
    assert len(drawing.branches) == 12
    assert [(loop.edge.before, loop.text) for loop in drawing.loops] == [
        ("actor_train", "lag 1"),
        ("critic_train", "lag 1"),
    ]


def test_plates_carry_real_allocations():
    graph = build_graph(sft(), DATASET_KEYS["sft"])
    scene = make_scene(graph, "t", {"sft_train": parse_allocation("d2t2@0:4-7", Cluster(1, 8))})
    assert scene.cards["sft_train"].plate == "d2t2p1 @ 0:4-7"


def test_paths():
    assert flow([((0, 0), (0, 0)), ((10, 0), (20, 0)), ((30, 5), (30, 5))]) == "M0 0H10H20C25 0 25 5 30 5"
    assert rounded([(0, 0), (10, 0), (10, 10)], 2) == "M0 0L8 0Q10 0 10 2L10 10"
    assert head((10, 0), (1, 0), 10) == "M10 0L0 -4.4L2.8 0L0 4.4Z"
    assert spread(3, 100) == [-11, 0, 11]
    assert spread(3, 10) == [-5, 0, 5]
    assert spread(1, 10) == [0]
