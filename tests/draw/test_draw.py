"""The four formats, and what users see when a picture cannot be made."""

import importlib.util
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from realrl.draw.picture import FORMATS, draw, write_picture
from realrl.draw.text import text_width
from realrl.draw.theme import ROLE_HUES, mix, role_hue
from realrl.errors import UsageError
from realrl.graph.build import build_graph
from realrl.graph.mfc import InterfaceRef
from realrl.mesh.device_mesh import Cluster
from realrl.mesh.notation import parse_allocation
from tests.graph.examples import DATASET_KEYS, ppo, seventeen, sft

SVG = "{http://www.w3.org/2000/svg}"
PPO_CALLS = [replace(mfc, n_passes=2 if mfc.name == "critic_train" else 1) for mfc in ppo(max_staleness=1)]
PPO = build_graph(PPO_CALLS, DATASET_KEYS["ppo"])
PLACES = {name: parse_allocation("d4t1p2@0:0-7", Cluster(1, 8)) for name in PPO}
NASTY = '</script><b a="1">&\'`#'


def svg_of(graph, **options):
    return ET.fromstring(draw(graph, title="t", fmt="svg", **options))


def texts(root):
    return [element.text for element in root.iter(f"{SVG}text")]


def nasty_graph(monkeypatch):
    """Names that `build_graph` refuses, for pictures are drawn of any graph."""
    monkeypatch.setattr("realrl.graph.checks._NAME", re.compile(".*"))
    mfcs = sft()
    mfcs[0] = replace(mfcs[0], name=NASTY, model_name=NASTY, interface_impl=InterfaceRef(NASTY, {NASTY: NASTY}))
    return build_graph(mfcs, DATASET_KEYS["sft"])


def test_svg_shows_everything():
    root = svg_of(PPO, allocations=PLACES)
    shown = texts(root)
    for name in PPO:
        assert shown.count(name) == 1
    assert shown.count("d4t1p2 @ 0:0-7") == 6
    assert {"dataset", "actor · generate", "ref · inference", "critic · train step", "lag 1", "lag 2"} <= set(shown)
    assert {"prompt_ids", "rewards", "ref_logprobs", "values", "4 minibatches", "4 minibatches · 2 passes"} <= set(
        shown
    )
    assert {"actor", "reward (frozen)", "ref (frozen)", "critic", "new parameters, lag in steps"} <= set(shown)
    kinds = {element.get("class") for element in root.iter(f"{SVG}path")}
    assert {"edge", "version", "head", "shape"} <= kinds


def test_a_call_that_drops_samples_is_seen_with_those_that_get_the_rest():
    mfcs = [replace(mfc, may_drop=mfc.name == "rew_inf") for mfc in ppo()]
    graph = build_graph(mfcs, DATASET_KEYS["ppo"])
    shown = texts(svg_of(graph))
    assert "kept samples" in shown  # ref_inf and critic_inf read no key of rew_inf, but wait for its verdict
    assert any("may drop samples" in (text or "") for text in shown)
    assert b"kept samples" in draw(graph, title="t", fmt="mmd")
    assert "kept samples" not in texts(svg_of(PPO))


def test_svg_shows_where_parameters_come_from():
    places = {
        "actor_gen": "d4t1p2@0:0-7", "critic_inf": "d2@0:0-1", "rew_inf": "p2@0:2-3", "ref_inf": "p4@0:4-7",
        "critic_train": "d2p2@0:4-7", "actor_train": "d2p2@0:0-3",
    }  # fmt: skip
    allocations = {name: parse_allocation(text, Cluster(1, 8)) for name, text in places.items()}
    shown = [text for text in texts(svg_of(PPO, allocations=allocations)) if text.startswith("parameters")]
    assert shown == ["parameters ← 0:0-3", "parameters ← 0:4-7"]
    allocations["critic_inf"] = parse_allocation("t4@0:4-7", Cluster(1, 8))
    assert "parameters ← d2t1p2" in texts(svg_of(PPO, allocations=allocations))
    assert not any(text.startswith("parameters") for text in texts(svg_of(PPO, allocations=PLACES)))
    graph = build_graph([replace(ppo()[0], protocol="DP_PROTO")], DATASET_KEYS["ppo"])
    assert "DP_PROTO" in texts(svg_of(graph))


def test_svg_shows_hooks_and_batches():
    shown = texts(svg_of(build_graph(seventeen(), DATASET_KEYS["seventeen"])))
    assert {"after: offload", "after: → teacher, eta 0.05", "streams from 16"} <= set(shown)


def test_svg_without_version_edges_has_no_legend_for_them():
    shown = texts(svg_of(build_graph(sft(), DATASET_KEYS["sft"])))
    assert "new parameters, lag in steps" not in shown
    assert "generate" not in shown


def test_svg_is_self_contained():
    text = draw(PPO, title="t", fmt="svg").decode()
    assert re.findall(r"https?://[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "url(" not in text
    assert "var(" not in text


def test_roles_have_colours_and_calls_have_shapes():
    root = svg_of(PPO)
    classes = {}
    for group in root.iter(f"{SVG}g"):
        if group.get("class", "").startswith("card"):
            name = next(text.text for text in group.iter(f"{SVG}text"))
            shape = next(element for element in group if element.get("class") == "shape")
            classes[name] = (group.get("class").split()[1], shape.tag.removeprefix(SVG), shape.get("rx"))
    assert classes["actor_gen"][0] == classes["actor_train"][0] != classes["critic_train"][0]
    assert len({classes[name][1:] for name in ("actor_gen", "ref_inf", "actor_train")}) == 3


@pytest.mark.parametrize("fmt", FORMATS)
def test_same_bytes_every_time(fmt):
    assert draw(PPO, title="t", allocations=PLACES, fmt=fmt) == draw(PPO, title="t", allocations=PLACES, fmt=fmt)


def test_png_is_a_picture_of_twice_the_size():
    content = draw(PPO, title="t", fmt="png")
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width = int.from_bytes(content[16:20], "big")
    assert width == pytest.approx(2 * float(svg_of(PPO).get("width")), abs=2)


def test_png_without_the_renderer(monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(UsageError, match=r"needs the package resvg_py[\s\S]*realrl\[viz\]"):
        draw(PPO, title="t", fmt="png")


def test_png_without_the_fonts(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs the fonts of the package matplotlib[\s\S]*realrl\[viz\]"):
        draw(PPO, title="t", fmt="png")


def test_mermaid():
    lines = draw(PPO, title='my "ppo"', allocations=PLACES, fmt="mmd").decode().splitlines()
    assert lines[:4] == ["---", r'title: "my \"ppo\""', "---", "flowchart LR"]
    assert '    n0[("dataset")]' in lines
    assert '    n1(["<b>actor_gen</b><br/>actor · generate<br/><small>d4t1p2 @ 0:0-7</small>"])' in lines
    assert any(line.startswith('    n3["<b>ref_inf</b>') for line in lines)
    assert any(line.startswith('    n5{{"<b>actor_train</b>') for line in lines)
    assert '    n1 -->|"input_ids<br/>truncated"| n4' in lines
    assert '    n5 -.->|"lag 2"| n1' in lines
    styled = [int(i) for line in lines if "linkStyle" in line for i in line.split()[1].split(",")]
    assert sorted(styled) == list(range(sum("-->" in line or "-.->" in line for line in lines)))


def page(graph, **options):
    return draw(graph, title=NASTY, fmt="html", **options).decode()


def details(text):
    return json.loads(re.search(r'<script type="application/json" id="details">(.*?)</script>', text, re.DOTALL)[1])


def test_html_tells_about_each_call():
    found = {entry["name"]: entry for entry in details(page(PPO, allocations=PLACES)).values()}
    assert set(found) == {"dataset", *PPO}
    rows = dict(found["critic_inf"]["rows"])
    assert found["critic_inf"]["about"] == "inference on critic (trained)"
    assert rows == {
        "interface": ["ppo_critic"],
        "reads": ["input_ids from actor_gen", "truncated from actor_gen"],
        "produces": ["values for actor_train, critic_train"],
        "batch": ["n_seqs = 32"],
        "waits for": ["critic_train of step i − 1"],
        "mesh": ["0:0-7"],
        "strategy": ["d4t1p2"],
    }
    assert dict(found["actor_gen"]["rows"])["reads"] == ["prompt_ids from dataset"]
    assert dict(found["dataset"]["rows"])["provides"] == ["prompt_ids for actor_gen"]
    assert found["ref_inf"]["about"] == "inference on ref (frozen)"


def test_html_tells_about_hooks_counts_and_remaps():
    mfcs = seventeen()
    mfcs[5] = replace(mfcs[5], input_key_remap={"input_ids": "ids"}, balanced_dp=True, max_tokens_per_mb=512)
    train = next(i for i, mfc in enumerate(mfcs) if mfc.name == "actor_train")
    mfcs[train] = replace(mfcs[train], virtual_stages=2)
    found = {entry["name"]: dict(entry["rows"]) for entry in details(page(build_graph(mfcs, ["prompt_ids"]))).values()}
    assert found["actor_train"]["after"] == ["→ teacher, eta 0.05"]
    assert "virtual_stages = 2" in found["actor_train"]["batch"]
    assert found["harmless_inf"]["reads"] == ["input_ids (as ids) from actor_gen"]
    assert found["harmless_inf"]["batch"] == [
        "n_seqs = 128",
        "min_n_seqs = 16",
        "max_tokens_per_mb = 512",
        "balanced_dp = True",
    ]
    assert found["actor_gen"]["batch"] == ["n_seqs = 128", "max_staleness = 2"]


def test_cards_say_what_is_special_about_a_batch():
    changes = {"ref_inf": {"n_mbs": 4, "balanced_dp": True}, "actor_train": {"max_tokens_per_mb": 512}}
    changes |= {"critic_train": {"virtual_stages": 3}}
    changes |= {"critic_inf": {"n_mbs": 1}, "actor_gen": {"min_n_seqs": 8, "protocol": "DP_PROTO"}}
    shown = texts(
        svg_of(build_graph([replace(mfc, **changes.get(mfc.name, {})) for mfc in ppo()], DATASET_KEYS["ppo"]))
    )
    for note in (
        "4 micro-batches · equal counts",
        "micro-batches of 512 tokens",
        "streams from 8",
        "DP_PROTO",
        "3 virtual stages",
    ):
        assert any(note in text for text in shown), note
    assert not any("1 micro-batch" in text for text in shown)


def test_html_is_self_contained_and_knows_both_modes():
    text = page(PPO)
    assert not re.search(r"""(?:src|href)\s*=|@import|url\(""", text)
    assert "prefers-color-scheme:dark" in text
    assert ":root[data-theme=dark] .picture .r0 .shape" in text
    assert "<!--" not in text.replace("<!doctype", "")


@pytest.mark.parametrize("fmt", ["svg", "html"])
def test_strange_names_are_text_and_nothing_else(fmt, monkeypatch):
    graph = nasty_graph(monkeypatch)
    content = draw(graph, title=NASTY, fmt=fmt).decode()
    assert "<b a=" not in content
    assert content.count("</script>") == (2 if fmt == "html" else 0)
    svg = re.search(r"<svg.*?</svg>", content, re.DOTALL)[0]
    assert texts(ET.fromstring(svg)).count(NASTY) >= 2
    if fmt == "html":
        assert details(content)["n1"]["name"] == NASTY


def test_strange_names_in_mermaid(monkeypatch):
    text = draw(nasty_graph(monkeypatch), title="t", fmt="mmd").decode()
    assert "#lt;/script#gt;#lt;b a=#quot;1#quot;#gt;#amp;'#96;#35;" in text


@pytest.mark.parametrize("suffix", FORMATS)
def test_write_picture_chooses_by_suffix(tmp_path, suffix):
    path = write_picture(tmp_path / f"graph.{suffix}", PPO, title="t", allocations=PLACES)
    assert path.read_bytes() == draw(PPO, title="t", allocations=PLACES, fmt=suffix)


def test_write_picture_accepts_capitals(tmp_path):
    assert write_picture(tmp_path / "GRAPH.SVG", PPO, title="t").read_bytes().startswith(b"<svg")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("graph.pngg", r"has the suffix '.pngg'[\s\S]*Did you mean '.png'"),
        ("graph", r"has no suffix[\s\S]*Use one of .svg, .png, .mmd, .html"),
        ("missing/graph.svg", r"cannot write the picture .*missing/graph.svg': No such file or directory"),
    ],
)
def test_write_picture_refusals(tmp_path, name, message):
    with pytest.raises(UsageError, match=message):
        write_picture(tmp_path / name, PPO, title="t")


def test_unknown_format():
    with pytest.raises(UsageError, match=r"no pictures of format 'pdf'[\s\S]*svg, png, mmd, html"):
        draw(PPO, title="t", fmt="pdf")


def test_roles_beyond_the_palette_repeat_colours():
    assert role_hue(len(ROLE_HUES)) == role_hue(0)
    assert len(set(ROLE_HUES)) == len(ROLE_HUES)
    assert mix("#000000", "#ffffff", 0.5) == "#808080"


def test_text_widths_cover_the_reference_font():
    """Widths must be at least those of DejaVu Sans, or text would leave its box in a png."""
    ttlib = pytest.importorskip("fontTools.ttLib")
    from realrl.draw.png import font_folder

    for file, options in (("DejaVuSans", {}), ("DejaVuSans-Bold", {"bold": True}), ("DejaVuSansMono", {"mono": True})):
        font = ttlib.TTFont(font_folder() / f"{file}.ttf")
        glyphs, metrics, em = font.getBestCmap(), font["hmtx"], font["head"].unitsPerEm
        for sample in ("actor_train", "critic · train step", "d16t8p4 @ 0:0-7", "WIDEST_Mm_09", "sampling@%&?<{}>"):
            real = sum(metrics[glyphs[ord(char)]][0] for char in sample) / em
            assert real <= text_width(sample, 1.0, **options) <= 1.2 * real
    assert text_width("漢字", 10) > 20
    assert text_width("e\u0301", 10) == text_width("e", 10)


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [
        (
            "realrl.graph.build, realrl.draw, realrl.mesh.notation",
            ("torch", "networkx", "matplotlib", "resvg_py", "realrl.draw.svg"),
        ),
        ("realrl.draw.picture", ("torch", "matplotlib", "resvg_py")),
    ],
)
def test_importing_the_graph_is_light(modules, heavy):
    code = f"import sys; import {modules}; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
