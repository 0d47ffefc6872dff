"""Folders that were damaged at random: a page, or a message, and never a traceback."""

import json
import random
import shutil

import pytest

from realrl import cli
from tests.report.folders import sample, steps, write_run
from tests.report.test_times import spans

VALUES = [
    "null",
    "-1",
    "1e999",
    "1e308",
    '"x"',
    "[]",
    "{}",
    "true",
    "9" * 400,
    '"\\ud800"',
    "NaN",
    "[[[[",
    "\x00",
    "-0.0",
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    rows = steps(12, reward__mean=lambda step: step / 7, time_s__step=2.0, n_tokens=10, memory_gb__0=0.5)
    samples = [sample(step, messages=[{"role": "user", "content": "a"}] if step % 2 else None) for step in range(1, 13)]
    return write_run(tmp_path_factory.mktemp("whole") / "a", rows, samples, spans(12))


def spoil(content: bytes, draw: random.Random) -> bytes:
    """Cut, repeat, overwrite or exchange some of it."""
    if not content:
        return b"{"
    at, length = draw.randrange(len(content)), draw.choice((1, 5, 60, 2000))
    kind = draw.randrange(5)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[at + length :]
    if kind == 2:
        return content[:at] + draw.randbytes(length) + content[at + length :]
    if kind == 3:
        return content[: at + length] + content[at:]
    numbers = [i for i in range(len(content)) if content[i : i + 2] in (b": ", b":1", b":2", b":0")]
    place = draw.choice(numbers) + 1 if numbers else at
    value = draw.choice(VALUES).encode()
    end = min((i for i in (content.find(b",", place), content.find(b"}", place)) if i >= 0), default=len(content))
    return content[:place] + value + content[end:]


def check(folder, whole, seed, capsys):
    draw = random.Random(seed)
    shutil.copytree(whole, folder)
    for name in draw.sample(["config.json", "metrics.jsonl", "generations.jsonl", "trace.json"], draw.randint(1, 3)):
        content = (folder / name).read_bytes()
        for _ in range(draw.randint(1, 4)):
            content = spoil(content, draw)
        (folder / name).write_bytes(content)
    code = cli.main(["report", str(folder)])
    told = capsys.readouterr()
    assert "Traceback" not in told.err, (seed, told.err)
    assert code in (0, 2), seed
    if code == 0:
        page = (folder / "report.html").read_text()
        data = page.partition('id="data">')[2].partition("</script>")[0]
        json.loads(data, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
        assert len(page.encode()) < 2_000_000
    shutil.rmtree(folder)


@pytest.mark.parametrize("seed", range(12))
def test_damaged_folders(tmp_path, whole, capsys, seed):
    check(tmp_path / "b", whole, seed, capsys)


@pytest.mark.slow
def test_many_damaged_folders(tmp_path, whole, capsys):
    for seed in range(100, 600):
        check(tmp_path / "b", whole, seed, capsys)
