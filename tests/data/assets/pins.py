"""Stand-ins for the pinned files."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from realrl.data.assets import fetch


def pin(monkeypatch: pytest.MonkeyPatch, name: str, file: Path, cache: Path) -> None:
    """Make `file` the pinned artifact `name` of `realrl.data.assets.fetch`, and put it into the cache."""
    content = file.read_bytes()
    pinned = replace(getattr(fetch, name), sha256=hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(fetch, name, pinned)
    (cache / "downloads").mkdir(parents=True, exist_ok=True)
    (cache / "downloads" / pinned.filename).write_bytes(content)
