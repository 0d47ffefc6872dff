"""Strategies of runs whose datasets, models, tokenizers, templates or checkpoints were spoilt."""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st
from pyarrow import parquet

from realrl.model.families import FAMILIES
from tests.fuzz.command import Command
from tests.fuzz.mutations import damaged, spoilt, texts, to_json, values
from tests.helpers.assets import make_model_folder
from tests.helpers.families import ONE_EACH, hf_config

LENGTHS = ("dataset.max_prompt_tokens=64", "generation.max_new_tokens=8")
INLINE = ("preset=tiny", "launcher=inline", "steps=2", "n_seqs=4", *LENGTHS)
ROWS: dict[str, list[dict[str, Any]]] = {
    "ppo": [{"prompt": f"hello {i}", "id": f"r{i}", "field": [i, {"a": None}]} for i in range(6)],
    "sft": [{"prompt": f"hello {i}", "answer": "world", "complete": True} for i in range(6)],
    "dpo": [
        {"prompt": f"hello {i}", "chosen": "yes", "rejected": [{"role": "assistant", "content": "no"}]}
        for i in range(6)
    ],
    "kto": [{"prompt": [{"role": "user", "content": f"hello {i}"}], "answer": "yes", "label": True} for i in range(6)],
}


ASKED, SAID = {"role": "user", "content": "hello"}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}
TALK = [{"role": "system", "content": "be"}, ASKED, SAID, ASKED, {**SAID, "content": None, "tool_calls": [{"a": 1}]},
        {"role": "tool", "content": "3"}, SAID]  # fmt: skip
TALKS: dict[str, list[dict[str, Any]]] = {
    "ppo": [{"messages": TALK, "more": {"a": [1, {"b": None}]}} for _ in range(6)],
    "sft": [{"messages": [{"from": "human", "value": f"hello {i}"}, {"from": "gpt", "value": "x"}]} for i in range(6)],
    "dpo": [{"prompt": "hello", "chosen": TALK, "rejected": [*TALK[:-1], {**SAID, "content": "no"}]} for _ in range(6)],
    "kto": [{"messages": TALK[:5], "label": True}, {"messages": TALK, "label": False}, *ROWS["kto"]],
}
NAMED = ("dataset.fields.prompt=question", "dataset.fields.answer=meta.gold")


@cache
def model_folder() -> Path:
    """A whole model with its tokenizer."""
    return make_model_folder(Path(mkdtemp()) / "model")


def _read(name: str) -> Any:
    return json.loads((model_folder() / name).read_text())


def _run(experiment: str, *arguments: str, looks: tuple[str, ...] = ()) -> tuple[str, ...]:
    lengths = INLINE if experiment == "ppo" else INLINE[:5]
    return (*(looks or ("run",)), experiment, *lengths, *arguments)


def _with_model(changed: Mapping[str, bytes], *more: str, gone: tuple[str, ...] = ()) -> Command:
    """A run of PPO on a model of which some files differ."""
    kept = {f"m/{p.name}": p for p in model_folder().iterdir() if p.name not in (*changed, *gone)}
    return Command(_run("ppo", "models.actor.path=m", *more), {**kept, **{f"m/{n}": c for n, c in changed.items()}})


# ---------------------------------------------------------------- datasets


@st.composite
def json_datasets(draw: st.DrawFn) -> Command:
    """JSON Lines and JSON files."""
    name = draw(st.sampled_from(sorted(ROWS)))
    rows = draw(spoilt(draw(st.sampled_from([ROWS, TALKS]))[name]))
    is_lines = draw(st.booleans()) and isinstance(rows, list)
    content = b"\n".join(map(to_json, rows)) if is_lines else to_json(rows)
    if draw(st.integers(0, 3)) == 0:
        content = draw(damaged(content))
    file = (
        "data.jsonl"
        if is_lines
        else draw(st.sampled_from(["data.json", "data.JSON", "data.jsonl", "data.txt", "é.json"]))
    )
    more = draw(st.sampled_from([(), (), ("dataset.chat_template=true",), ("dataset.max_prompt_tokens=3",)]))
    if draw(st.integers(0, 3)):
        return Command(_run(name, f"dataset.path={file}", *more), {file: content})
    return Command(_run(name, *draw(sources(file)), *more), {file: content, "parts/1.jsonl": content})


@st.composite
def sources(draw: st.DrawFn, file: str) -> list[str]:
    """Settings that name several files, folders or patterns, with weights and names of fields."""
    places = st.sampled_from([file, "parts", "parts/*.jsonl", ".", "**", "*", "/", "/dev/*", "org/data", "[", "tiny"])
    names = st.sampled_from(["question", "prompt", "messages", "meta.gold", ".", "a..b"]) | texts
    found = [f"dataset.files.{name}={quoted(draw(places))}" for name in ("a", "b")[: draw(st.integers(1, 2))]]
    found += [f"dataset.files.a.weight={w}" for w in draw(st.sampled_from([[], [1], [0], [1e-300], [1e300], ["x"]]))]
    found += ["dataset.files.b.weight=2"] if len(found) > 2 and draw(st.booleans()) else []
    fields = st.sampled_from(["prompt", "messages", "answer", "id", "chosen", "label", "complete", "no"])
    return found + [f"dataset.fields.{draw(fields)}={quoted(draw(names))}" for _ in range(draw(st.integers(0, 2)))]


def quoted(text: str) -> str:
    """A text in the grammar of the command line."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@st.composite
def parquet_datasets(draw: st.DrawFn) -> Command:
    """Parquet files with other types, and damaged ones."""
    name = draw(st.sampled_from(["ppo", "sft"]))
    columns: dict[str, Any] = {"prompt": [f"hello {i}" for i in range(6)], "answer": ["yes"] * 6}
    other = [
        pa.array([b"\xff\xfe"] * 6),
        pa.array([10**15] * 6, pa.timestamp("s")),
        pa.array([2**62] * 6, pa.timestamp("ns")),
        pa.array([1] * 6, pa.duration("ns")),
        pa.array([[1, 2]] * 6),
        pa.array([{"a": 1}] * 6),
        pa.nulls(6),
        pa.array([float("nan")] * 6),
        pa.array([2**63] * 6, pa.uint64()),
        pa.array([[("k", 1)]] * 6, pa.map_("string", "int64")),
        pa.array(["x", "y"] * 3).dictionary_encode(),
        pa.array([True] * 6),
        pa.array([-(2**40)] * 6, pa.date64()),
    ]
    columns[draw(st.sampled_from(["prompt", "answer", "id", "more", "label", ""]) | texts)] = draw(
        st.sampled_from(other)
    )
    out = io.BytesIO()
    try:
        parquet.write_table(pa.table(columns), out, compression=draw(st.sampled_from(["none", "snappy", "gzip"])))
    except (pa.ArrowException, ValueError, UnicodeError):
        out.write(b"PAR1")
    content = out.getvalue()
    if draw(st.booleans()):
        at = max(0, len(content) - draw(st.integers(1, 400)))  # the footer is at the end
        content = content[:at] + draw(damaged(content[at:]))
    return Command(_run(name, "dataset.path=data.parquet"), {"data.parquet": content})


# ---------------------------------------------------------------- models


@cache
def _configs() -> list[dict[str, Any]]:
    made = [json.loads(hf_config(case, vocab_size=260).to_json_string(use_diff=False)) for case in ONE_EACH]
    for config in made:
        config["architectures"] = [FAMILIES[config["model_type"]].lm_architecture]
    return [_read("config.json"), *made]


@st.composite
def model_configs(draw: st.DrawFn) -> Command:
    """`config.json` of every family."""
    config = draw(st.sampled_from(_configs()))
    content = to_json(draw(spoilt(config)))
    if draw(st.integers(0, 9)) == 0:
        content = draw(damaged(content))
    more = draw(st.sampled_from([(), (), ("models.actor.lora.rank=2",), ("allocation=t1p1d1",)]))
    return _with_model({"config.json": content}, *more)


@st.composite
def tensor_files(draw: st.DrawFn) -> Command:
    """Headers and lengths of safetensors, and the index of several files."""
    whole = (model_folder() / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return _with_model({"model.safetensors": draw(damaged(whole[: size + 400]))})
    if kind == 1:
        header = to_json(draw(spoilt(json.loads(whole[8 : 8 + size]))))
        told = draw(st.sampled_from([len(header), len(header), 0, 2**63, 2**64 - 1, len(header) - 1, 2**31]))
        return _with_model({"model.safetensors": struct.pack("<Q", told) + header + whole[8 + size :]})
    names = list(json.loads(whole[8 : 8 + size]))[:3]
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    content = to_json(draw(spoilt(index)))
    return _with_model({"model.safetensors.index.json": content if kind == 2 else draw(damaged(content))})


# ---------------------------------------------------------------- tokenizers and templates


@st.composite
def tokenizers(draw: st.DrawFn) -> Command:
    """tokenizer.json and tokenizer_config.json, or other files in their place."""
    file = draw(st.sampled_from(["tokenizer.json", "tokenizer.json", "tokenizer_config.json"]))
    document = _read(file)
    if "model" in document and draw(st.booleans()):
        vocab = document["model"].pop("vocab")
        document = draw(spoilt(document))
        if isinstance(document, dict) and isinstance(document.get("model"), dict):
            document["model"].setdefault("vocab", vocab)
    else:
        document = draw(spoilt(document))
    content = to_json(document)
    if draw(st.integers(0, 9)) == 0:
        content = draw(damaged(content))
    if draw(st.integers(0, 9)) == 0:
        other = draw(st.sampled_from(["tokenizer.model", "vocab.json", "vocab.txt", "spiece.model"]))
        code = to_json({"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"})
        changed = {other: content, "tokenizer_config.json": code, "own.py": b"import os; os._exit(0)"}
        return _with_model(changed, gone=("tokenizer.json",))
    return _with_model({file: content})


TEMPLATES = [
    "{{ messages[0].content }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 'a' * 10**10 }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{{ 'a' * 9999999999 }}",
    "{{ 1 / 0 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ ''.__class__.__mro__ }}",
    "{% include 'x' %}",
    "{{ messages * 10 }}",
    "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{{",
    "{% if %}",
    "",
    "{{ raise_exception('x' * 9999) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ '%999999999999d' % 1 }}",
    "{{ 'x'|center(9999999999) }}",
    "{% generation %}{{ messages[0].content }}{% endgeneration %}",
    "{{ strftime_now('%Y') }}",
    "{{ range(10**9)|list }}",
    "(" * 999,
    "{{ " + "(" * 3000 + ")" * 3000 + " }}",
    "{{ " + "1 + " * 9999 + "1 }}",
    "{% do x %}",
    "{{ messages|tojson(indent=999999999) }}",
]


@st.composite
def templates(draw: st.DrawFn) -> Command:
    """Chat templates: programs that loop, grow, fail, or are no programs."""
    template = draw(st.sampled_from(TEMPLATES) | values | texts)
    config = {**_read("tokenizer_config.json"), "chat_template": template}
    changed = {"tokenizer_config.json": to_json(config)}
    if draw(st.booleans()) and isinstance(template, str):
        changed = {"chat_template.jinja": template.encode("utf-8", "surrogatepass")}
    return _with_model(changed, "dataset.chat_template=true", gone=("chat_template.jinja",))


# ---------------------------------------------------------------- checkpoints


@cache
def checkpoint() -> dict[str, bytes]:
    """The files of a whole checkpoint of a small run."""
    from realrl import cli

    folder = Path(mkdtemp()) / "run"
    assert cli.main(["run", "sft", "preset=tiny", "launcher=inline", "steps=1", "n_seqs=4", f"run_dir={folder}"]) == 0
    root = folder / "checkpoints" / "step_1"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


MANIFEST = "state/manifest.json"


@st.composite
def checkpoints(draw: st.DrawFn) -> Command:
    """Manifests, signed anew or not, and headers of state files."""
    files = dict(checkpoint())
    tree = json.loads(files[MANIFEST])
    tree.pop("digest")
    if draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from([name for name in files if name != MANIFEST]))
        files[name] = draw(damaged(files[name][:5000]))
        entry = {"size_bytes": len(files[name]), "sha256": hashlib.sha256(files[name]).hexdigest()}
        tree["files"][name] = {**tree["files"][name], **entry}
    else:
        tree = draw(spoilt(tree))
    content = to_json(tree)
    if isinstance(tree, dict) and draw(st.integers(0, 4)):
        try:
            read = json.loads(content)
            digest = hashlib.sha256(json.dumps(read, sort_keys=True).encode()).hexdigest()
            content = content.rstrip()[:-1] + f', "digest": "{digest}"}}'.encode()
        except (ValueError, RecursionError, TypeError):
            pass
    elif draw(st.booleans()):
        content = draw(damaged(content))
    files[MANIFEST] = content
    resume = draw(st.sampled_from(["resume=auto", "resume=r/checkpoints/step_1"]))
    return _continued(files, resume, looks=draw(st.sampled_from([("run",), ("run", "--dry-run")])))


def _continued(files: Mapping[str, bytes], resume: str = "resume=auto", looks: tuple[str, ...] = ("run",)) -> Command:
    arguments = _run("sft", "run_dir=r", resume, looks=looks)
    return Command(arguments, {f"r/checkpoints/step_1/{name}": data for name, data in files.items()})


def whole() -> list[Command]:
    """Commands of which nothing is spoilt, one for each way through the code."""
    rows = {"data.jsonl": b"\n".join(map(to_json, ROWS["ppo"]))}
    template = {"tokenizer_config.json": to_json({**_read("tokenizer_config.json"), "chat_template": TEMPLATES[0]})}
    table = io.BytesIO()
    parquet.write_table(pa.table({"prompt": [f"hello {i}" for i in range(6)]}), table)
    return [
        _with_model({}),
        _with_model(template, "dataset.chat_template=true"),
        Command(_run("ppo", "dataset.path=data.jsonl"), rows),
        Command(
            _run(
                "sft",
                "dataset.files.a=named.jsonl",
                "dataset.files.a.weight=2",
                "dataset.files.b=talks.jsonl",
                "dataset.files.b.weight=1",
                *(name.replace("fields", "files.a.fields") for name in NAMED),
            ),
            {
                "named.jsonl": b"\n".join([to_json({"question": "q", "meta": {"gold": "x"}})] * 6),
                "talks.jsonl": b"\n".join(map(to_json, TALKS["sft"])),
            },
        ),
        *(
            Command(_run(name, "dataset.path=d.jsonl"), {"d.jsonl": b"\n".join(map(to_json, rows))})
            for name, rows in TALKS.items()
        ),
        Command(_run("ppo", "dataset.path=data.parquet"), {"data.parquet": table.getvalue()}),
        _continued(checkpoint()),
    ]
