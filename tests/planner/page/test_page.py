"""The page: it loads nothing, shows everything, covers nothing, and stays small."""

import json
import re
import xml.etree.ElementTree as ET
from itertools import combinations, pairwise

import pytest

from realrl.draw.text import text_width
from realrl.draw.theme import DARK, LIGHT, ROLE_HUES, mix
from realrl.planner.evaluate import evaluate
from realrl.planner.page.memory import FIELDS, DeviceMemory
from realrl.planner.page.pictures import CHART, LEFT, RIGHT, WIDTH, Rival, nice, rivals_svg, shortened
from realrl.planner.page.render import PageContent, render_page, render_timeline
from realrl.planner.page.style import SHADES, contrast, rules
from realrl.planner.page.timeline import TICKS
from tests.planner.cases import everywhere, request_for, with_critic_apart

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '</script><b a="1">&\'`#'


def page_of(found, **more):
    memory = DeviceMemory(found.memory, found.capacity, found.on_cpu)
    rivals = [Rival("search", found.period_s, is_best=True), Rival(NASTY, 2 * found.period_s, "slow " * 80),
              Rival("colocate", None, NASTY)]  # fmt: skip
    return PageContent(found.plan, found.run, (NASTY,), memory, rivals, 0.9 * found.period_s, **more)


@pytest.fixture(scope="module")
def apart():
    request = request_for(devices=8)
    return evaluate(request, with_critic_apart(request))


@pytest.fixture(scope="module")
def page(apart):
    return render_page(page_of(apart))


def pictures(page):
    return {
        re.search(r'class="(?:plot )?(\w+)"', text)[1]: ET.fromstring(text)
        for text in re.findall(r"<svg xmlns.*?</svg>", page, re.S)
    }


def test_it_loads_nothing(page):
    assert set(re.findall(r"https?://[^\"'\s]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "@import" not in page
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|img|iframe)|<script src", page)
    assert set(re.findall(r"url\(([^)]*)\)", page)) <= {"#plot", "#plot2"}
    assert "<!--" not in page, "a part is missing"


def test_the_script_finds_what_it_looks_for(page):
    """Elements that it asks for are there, and so are the figures."""
    script = re.search(r"<script>(.*)</script>", page, re.S)[1]
    for name in re.findall(r"byId\('(\w+)'\)", script):
        assert f'id="{name}"' in page, name
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    assert set(re.findall(r"\bdata\.(\w+)", script)) <= data.keys()
    for shape in re.findall(r"(\w+): [\d.]+", re.search(r"const share = \{(.*?)\}", script)[1]):
        assert shape in data["shapes"]


def test_names_cannot_leave_their_place(page):
    assert "<b a=" not in page
    assert "&lt;/script&gt;&lt;b a=" in page
    json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])


def test_it_shows_everything(apart, page):
    assert set(pictures(page)) == {"timeline", "memory", "picture", "rivals"}
    for name, place in apart.plan.allocations.items():
        assert name in page
        assert str(place) in page
    assert "devices 0-3" in page
    assert "no plan is faster than" in page
    assert "These cannot run here" in page
    for name in apart.figures.bounds:
        assert name in page


def test_same_text_every_time(apart, page):
    assert render_page(page_of(apart)) == page


def test_the_script_has_the_same_bars(apart, page):
    """Rows of the data are those of the run: calls of a rank take as long as in the figures."""
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])
    n_ranks = 0
    for group in data["groups"]:
        for ranks, flat in group["rows"]:
            for part in ranks.split(","):
                first, _, last = part.partition("-")
                n_ranks += int(last or first) - int(first) + 1
            bars = [flat[i : i + 4] for i in range(0, len(flat), 4)]
            assert all(0 <= b <= s <= e <= TICKS for _, b, s, e in bars)
    assert n_ranks == apart.run.n_ranks
    for chart in data["memory"]:
        for _, _, _, pieces in chart["options"]:
            assert pieces[0][0] == 0
            assert pieces[-1][1] == TICKS
            assert all(a[1] == b[0] for a, b in pairwise(pieces))
            assert all(len(piece) == 2 + len(FIELDS) for piece in pieces)
    peak = max(sum(p[2:]) for chart in data["memory"] for _, _, _, pieces in chart["options"] for p in pieces)
    assert peak == pytest.approx(apart.fullest[2] / 1e6, abs=len(FIELDS))


# ---------------------------------------------------------------- geometry


def boxes_of(root):
    """(text, left, top, right, bottom) of every visible text, in the picture's coordinates."""

    def walk(element, dx, dy):
        moved = re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", element.get("transform", ""))
        if moved:
            dx, dy = dx + float(moved[1]), dy + float(moved[2])
        if element.tag == f"{SVG}text" and element.get("visibility") != "hidden" and element.text:
            size, x, y = (float(element.get(key)) for key in ("font-size", "x", "y"))
            width = text_width(element.text, size, bold=element.get("font-weight") == "600")
            left = x + dx - {"middle": width / 2, "end": width, "start": 0.0}[element.get("text-anchor")]
            yield element.text, left, y + dy - 0.75 * size, left + width, y + dy + 0.2 * size
        for child in element:
            yield from walk(child, dx, dy)

    return list(walk(root, 0.0, 0.0))


def check_texts(root):
    _, _, width, height = map(float, root.get("viewBox").split())
    boxes = boxes_of(root)
    for text, left, top, right, bottom in boxes:
        assert left >= 0, text
        assert right <= width + 0.5, text
        assert top >= 0, text
        assert bottom <= height + 0.5, text
    for a, b in combinations(boxes, 2):
        assert a[3] <= b[1] or b[3] <= a[1] or a[4] <= b[2] or b[4] <= a[2], (a, b)


@pytest.mark.parametrize("devices", [1, 8, 32])
def test_nothing_covers_anything(devices):
    request = request_for("n_seqs=128", devices=devices)
    whole = {1: "d1@0:0", 8: "d8@0:0-7", 32: "d32@0-3"}[devices]
    found = evaluate(request, everywhere(request, whole))
    for name, root in pictures(render_page(page_of(found))).items():
        if name != "picture":  # tests/draw has it
            check_texts(root)


def test_texts_of_a_divided_plan(page):
    for name, root in pictures(page).items():
        if name != "picture":
            check_texts(root)


def test_bars_stay_in_their_rows(page):
    root = pictures(page)["timeline"]
    assert float(root.get("viewBox").split()[2]) == WIDTH
    scale = re.compile(r"translate\((\S+) 0\) scale\((\S+) 1\)")
    n_bars = 0
    for bars in root.iter(f"{SVG}g"):
        if bars.get("class") == "bars":
            left, factor = map(float, scale.match(bars.get("transform")).groups())
            assert left == LEFT
            assert factor * TICKS == pytest.approx(RIGHT - LEFT)
            for bar in bars:
                x, y, width, height = (float(bar.get(key)) for key in ("x", "y", "width", "height"))
                assert x >= 0
                assert x + width <= TICKS
                assert width > 0
                assert 0 <= y <= y + height <= 42
                n_bars += 1
    assert n_bars > 20


@pytest.mark.parametrize("share", [1.3, 0.9, 0.1])
def test_memory_of_the_charts_adds_up(apart, share):
    """At its highest, the stack of the fullest device is as high as its bytes; the room is a line where it is near."""
    capacity = int(apart.fullest[2] / share)
    content = PageContent(apart.plan, apart.run, memory=DeviceMemory(apart.memory, capacity))
    root = pictures(render_page(content))["memory"]
    charts = [chart for chart in root.iter(f"{SVG}g") if chart.get("class") == "chart"]
    paths = [path.get("d") for chart in charts for path in chart.iter(f"{SVG}path")]
    used = CHART - min(float(y) for path in paths for y in re.findall(r"V([\d.]+)H", path))
    lines = [CHART - float(line.get("y1")) for chart in charts for line in chart.iter(f"{SVG}line")]
    if share < 0.25:
        assert not lines
        assert used == pytest.approx(CHART / 1.06, abs=0.1)
    else:
        assert used / lines[0] == pytest.approx(share, abs=0.01)
        assert max(used, lines[0]) <= CHART
    check_texts(root)


# ---------------------------------------------------------------- colours, sizes, small things


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=["light", "dark"])
def test_names_on_bars_can_be_read(theme):
    for hue in ROLE_HUES:
        strong = mix(hue, "#ffffff", theme.lift)
        for shade in SHADES.values():
            fill = mix(strong, theme.paper, shade)
            assert max(contrast(fill, theme.ink), contrast(fill, theme.paper)) >= 3.9, (hue, shade)
    assert ".r1.train{fill:" in rules(theme, 2)


def test_contrast():
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)
    assert contrast("#777777", "#777777") == 1.0


def test_marks_of_an_axis():
    assert [nice(least) for least in (0.9, 1.0, 1.1, 2.1, 7.0, 0.03)] == pytest.approx([1, 1, 2, 5, 10, 0.05])


def test_words_are_cut_to_their_room():
    assert shortened("short", 200, 12) == "short"
    cut = shortened("a very long name " * 9, 120, 12)
    assert cut.endswith("…")
    assert text_width(cut, 12) <= 120


def test_plans_without_any_period():
    ET.fromstring(rivals_svg([Rival("a", None, "no room")], None))


def test_a_picture_alone_has_its_colours(apart):
    text = render_timeline(PageContent(apart.plan, apart.run))
    assert "var(" not in text
    root = ET.fromstring(text)
    assert root.get("width") == "1200"


def test_a_run_without_memory(apart):
    text = render_page(PageContent(apart.plan, apart.run))
    assert "was not counted" in text
    assert set(pictures(text)) == {"timeline", "picture"}


def test_it_stays_small():
    request = request_for("n_seqs=512", devices=128)
    found = evaluate(request, everywhere(request, "d128@0-15"))
    assert len(render_page(page_of(found)).encode()) < 2_000_000
