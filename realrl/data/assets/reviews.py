"""Human sentiment ratings of text snippets, and the preference pairs and prompts made of them.

Source: C. J. Hutto and E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of Social Media
Text", ICWSM 2014; the archive ``hutto_ICWSM_2014.tar.gz`` inside the source distribution of vaderSentiment (MIT).
About 20 people (up to 99 for some tweets) rated each snippet from -4, extremely negative, to 4, extremely positive.

Invariants of `build_reviews`, a pure function of the archive:
- a snippet serves one purpose: training pairs, training prompts, or held-out pairs and prompts; no held-out prompt is
  also a training prompt;
- the two snippets of a pair have mean ratings at least `MIN_GAP` apart, `chosen` is the higher, and no snippet is in
  two pairs.
"""

from __future__ import annotations

import html
import io
import json
import random
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from realrl.errors import AssetError

MIN_GAP = 1.5
PROMPT_WORDS = (4, 6)
MIN_WORDS_AFTER_PROMPT = 3
_SEED = 2014
_INNER = "hutto_ICWSM_2014.tar.gz"
# Snippets per source; the last line of each file has no line end.
_SOURCES = {
    "movie": ("movieReviewSnippets", 10_605),
    "product": ("amazonReviewSnippets", 3_708),
    "tweet": ("tweets", 4_200),
    "editorial": ("nytEditorialSnippets", 5_190),
}
# Shares of the movie snippets, in this order, of a seeded shuffle; the rest is held out.
_PAIR_SHARE, _PROMPT_SHARE = 0.5, 0.3

PAIRS_TRAIN, PAIRS_HELDOUT = "reviews_pairs_train.jsonl", "reviews_pairs_heldout.jsonl"
PROMPTS_TRAIN, PROMPTS_HELDOUT = "reviews_prompts_train.jsonl", "reviews_prompts_heldout.jsonl"
RATINGS = "ratings.jsonl"


@dataclass(frozen=True)
class Snippet:
    """A rated text: `id` is "movie-17", `mean` the mean rating, `ratings` the single ones."""

    id: str
    text: str
    mean: float
    ratings: tuple[int, ...]


def read_archive(sdist: Path) -> dict[str, list[Snippet]]:
    """Source name ("movie", "product", "tweet", "editorial") -> its snippets, repeated texts left out.

    Raises:
        AssetError: the archive is not what it should be.
    """
    try:
        with tarfile.open(sdist) as outer:
            name = next(n for n in outer.getnames() if n.endswith("/" + _INNER))
            inner = _member(outer, name)
        with tarfile.open(fileobj=io.BytesIO(inner)) as files:
            return {source: _read_source(files, source) for source in _SOURCES}
    except (tarfile.TarError, StopIteration, KeyError, ValueError, OSError, EOFError) as error:
        raise AssetError(f"{sdist} does not hold the ratings as expected: {error}", remedy="Fetch it again.") from error


def build_reviews(sdist: Path, target: Path) -> None:
    """Write the ratings, and the training and held-out pairs and prompts of movie reviews, into folder `target`.

    Raises:
        AssetError: see `read_archive`.
    """
    sources = read_archive(sdist)
    _write(target / RATINGS, (asdict(snippet) for snippets in sources.values() for snippet in snippets))
    rng = random.Random(_SEED)
    movies = list(sources["movie"])
    rng.shuffle(movies)
    first, second = round(len(movies) * _PAIR_SHARE), round(len(movies) * (_PAIR_SHARE + _PROMPT_SHARE))
    for_pairs, for_prompts, heldout = movies[:first], movies[first:second], movies[second:]
    _write(target / PAIRS_TRAIN, make_pairs(for_pairs))
    _write(target / PAIRS_HELDOUT, make_pairs(heldout))
    heldout_prompts = make_prompts(heldout, rng)
    held = {row["prompt"] for row in heldout_prompts}
    _write(target / PROMPTS_HELDOUT, heldout_prompts)
    _write(target / PROMPTS_TRAIN, (row for row in make_prompts(for_prompts, rng) if row["prompt"] not in held))


def make_pairs(snippets: Sequence[Snippet]) -> list[dict[str, Any]]:
    """Preference rows: each snippet pairs with the earliest unpaired one that is rated at least `MIN_GAP` apart."""
    waiting: list[Snippet] = []
    rows = []
    for snippet in snippets:
        at = next((i for i, other in enumerate(waiting) if abs(other.mean - snippet.mean) >= MIN_GAP), None)
        if at is None:
            waiting.append(snippet)
            continue
        rejected, chosen = sorted((waiting.pop(at), snippet), key=lambda s: s.mean)
        rows.append(
            {
                "id": f"{chosen.id}>{rejected.id}",
                "chosen": chosen.text,
                "rejected": rejected.text,
                "chosen_rating": round(chosen.mean, 3),
                "rejected_rating": round(rejected.mean, 3),
            }
        )
    return rows


def make_prompts(snippets: Sequence[Snippet], rng: random.Random) -> list[dict[str, Any]]:
    """Prompt rows: the first words of the snippets that are long enough to be continued; repeated prompts left out."""
    rows: dict[str, dict[str, Any]] = {}
    for snippet in snippets:
        words = snippet.text.split()
        n_words = rng.randint(*PROMPT_WORDS)
        prompt = " ".join(words[:n_words])
        if len(words) >= n_words + MIN_WORDS_AFTER_PROMPT and prompt not in rows:
            rows[prompt] = {"id": snippet.id, "prompt": prompt, "rating": round(snippet.mean, 3)}
    return list(rows.values())


def _read_source(files: tarfile.TarFile, source: str) -> list[Snippet]:
    stem, n_expected = _SOURCES[source]
    texts = _table(files, f"{stem}_GroundTruth.txt", n_columns=3)
    ratings = _table(files, f"{stem}_anonDataRatings.txt", n_columns=4)
    if len(texts) != n_expected or texts.keys() != ratings.keys():
        raise ValueError(f"{stem} has {len(texts)} texts and {len(ratings)} rows of ratings, expected {n_expected}")
    by_text: dict[str, Snippet] = {}
    for key, (mean, raw) in texts.items():
        text = " ".join(html.unescape(raw).replace("''", '"').split())
        snippet = Snippet(f"{source}-{key}", text, float(mean), tuple(json.loads(ratings[key][2])))
        by_text.setdefault(text, snippet)
    return list(by_text.values())


def _table(files: tarfile.TarFile, name: str, *, n_columns: int) -> dict[str, list[str]]:
    content = _member(files, f"{_INNER.removesuffix('.tar.gz')}/{name}").decode("utf-8-sig")
    rows = [line.split("\t") for line in content.split("\r\n") if line]
    bad = next((row for row in rows if len(row) != n_columns), None)
    if bad is not None:
        raise ValueError(f"{name} has the line {bad!r}")
    return {row[0]: row[1:] for row in rows}


def _member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    if file is None:
        raise ValueError(f"{name} is not a file")
    return file.read()


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
