"""Runs are told apart by what differs, and averaged where that is the seed alone."""

from realrl.report.settings import differing, flat_settings, group_names, run_names, seed_groups, short_paths, shown


def runs(*settings):
    base = {"experiment": "ppo", "seed": 1, "models": {"actor": {"lr": 0.1}, "critic": {"lr": 0.2}}, "run_dir": "a"}
    return flat_settings([{**base, **own} for own in settings])


def test_seeds_are_grouped_wherever_they_ran():
    flats = runs(
        {}, {"seed": 2, "run_dir": "b"}, {"n_seqs": 4}, {"n_seqs": 4, "seed": 2}, {"track": ["wandb"], "seed": 3}
    )
    assert seed_groups(flats) == [[0, 1, 4], [2, 3]]
    assert group_names(flats, [[0, 1, 4], [2, 3]], list("abcde")) == ["a", "n_seqs=4"]


def test_the_same_run_twice_is_no_pair_of_seeds():
    assert seed_groups(runs({}, {}, {"seed": 2})) == [[0, 2], [1]]
    assert seed_groups([{}, {}]) == [[0], [1]], "without settings nothing is known"


def test_names_say_what_differs():
    flats = runs({}, {"models": {"actor": {"lr": 0.3}, "critic": {"lr": 0.2}}})
    assert differing(flats) == ["models.actor.lr"]
    assert group_names(flats, seed_groups(flats), ["a", "b"]) == ["lr=0.1", "lr=0.3"]
    assert group_names(flats[:1], [[0]], ["a"]) == ["a"]
    assert group_names(runs({}, {"seed": 2}), [[0, 1]], ["a", "b"]) == ["2 seeds"]


def test_one_and_true_differ():
    assert differing([{"a": 1, "b": 1, "c": None}, {"a": True, "b": 1.0, "c": "null"}]) == ["a", "c"]


def test_short_names():
    assert short_paths(["a.x.lr", "b.x.lr", "c.seed"]) == {"a.x.lr": "a.x.lr", "b.x.lr": "b.x.lr", "c.seed": "seed"}
    assert run_names(["/r/ppo/1", "/r/grpo/1", "/r/grpo/2/"]) == ["ppo/1", "grpo/1", "grpo/2"]
    assert run_names(["/r/a"]) == ["a"]
    assert [shown(value) for value in ("", "a", None, [1], True)] == ["''", "a", "null", "[1]", "true"]
