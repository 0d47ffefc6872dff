from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from realrl.errors import ConfigError
from realrl.sim.lengths import lengths_from, recorded_lengths

IDS = [f"1/{i}" for i in range(2000)]


def lengths(text="prompt=fixed:100 response=lognormal:400,0.6", limit=4096, **changes):
    return lengths_from(text, max_prompt_tokens=256, max_new_tokens=limit, source="--lengths", **changes)


def test_distributions_have_their_parameters():
    found = lengths()
    assert {found.prompt(i) for i in IDS} == {100}
    assert median(found.response(i) for i in IDS) == pytest.approx(400, rel=0.05)
    uniform = [lengths("prompt=fixed:1 response=uniform:10,20").response(i) for i in IDS]
    assert set(uniform) == set(range(10, 21))
    normal = [lengths("prompt=fixed:1 response=normal:100,10").response(i) for i in IDS]
    assert mean(normal) == pytest.approx(100, abs=1)


def test_responses_are_cut_at_the_limit():
    assert max(lengths(limit=500).response(i) for i in IDS) == 500


@given(st.sampled_from(IDS), st.integers(0, 8), st.integers(1, 2**40))
def test_a_length_depends_on_its_key_alone(sample_id, number, seed):
    first, again = lengths(seed=seed), lengths(seed=seed)
    again.response("another")
    assert first.response(sample_id, number) == again.response(sample_id, number)
    assert 1 <= first.response(sample_id, number) <= 4096


def test_calls_responses_and_seeds_differ():
    found = lengths()
    for other in (
        [found.response(i, 1) for i in IDS],
        [found.response(i, call="greedy") for i in IDS],
        [lengths(seed=2).response(i) for i in IDS],
    ):
        assert other != [found.response(i) for i in IDS]


def test_recorded_lengths_are_drawn():
    lines = ['{"response_tokens": 3, "prompt": "a"}', "", '{"response_tokens": 9, "prompt_tokens": 5}']
    recorded = recorded_lengths(lines, source="generations.jsonl")
    assert recorded == {"response": [3, 9], "prompt": [5]}
    found = lengths_from(recorded, max_prompt_tokens=8, max_new_tokens=8, source="generations.jsonl")
    assert {found.response(i) for i in IDS} == {3, 8}
    assert {found.prompt(i) for i in IDS} == {5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "prompt=fixed:300 response=fixed:3",
            r"prompts of typically 300 tokens exceed dataset\.max_prompt_tokens=256\n  Set",
        ),
        (
            "prompt=fixed:3 response=lognormal:5000,1",
            r"responses of typically 5000 tokens exceed generation\.max_new_tokens",
        ),
        ("prompt=fixed:3", r"the lengths of responses are missing\n  Write it like prompt="),
        ("prompt=fixed:3 respons=fixed:3", r"no lengths of 'respons'\. Did you mean 'response'"),
        ("fixed:3", r"'fixed:3' is no lengths"),
        ("prompt=fixed:3 prompt=fixed:3", r"'prompt=fixed:3' is no lengths"),
        ("prompt=fixed:3 response=gamma:3", r"response='gamma:3' is no distribution of lengths.*\n  Use fixed:TOKENS"),
        ("prompt=fixed:3 response=lognorml:3,1", r"Did you mean 'lognormal'"),
        (
            "prompt=fixed:3 response=lognormal:3",
            r"lognormal takes median and sigma, positive numbers, and a sigma of 10",
        ),
        ("prompt=fixed:3 response=lognormal:3,200", r"sigma of 10 at most"),
        ("prompt=fixed:3 response=uniform:9,3", r"uniform takes least and most, positive numbers in ascending order"),
        ("prompt=fixed:-3 response=fixed:3", r"fixed takes tokens, positive numbers"),
        ("prompt=fixed:nan response=fixed:3", r"fixed takes tokens, positive numbers"),
    ],
)
def test_bad_texts(text, message):
    with pytest.raises(ConfigError, match=message):
        lengths(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "line 1 is no JSON object"),
        ("[1]", "line 1 is no JSON object"),
        ('{"response_tokens": 0}', "line 1 has response_tokens='0'"),
        ('{"response_tokens": 1.5}', "line 1 has response_tokens='1.5'"),
        ('{"response": "a"}', "no line has response_tokens"),
    ],
)
def test_bad_recordings(line, message):
    with pytest.raises(ConfigError, match=message):
        recorded_lengths([line], source="generations.jsonl")


def test_bad_lists():
    with pytest.raises(ConfigError, match=r"recorded lengths are whole numbers"):
        lengths_from({"prompt": [0], "response": [1]}, max_prompt_tokens=8, max_new_tokens=8, source="x")
