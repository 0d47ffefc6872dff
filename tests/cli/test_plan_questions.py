"""Questions about a plan on the command line: what is answered, and what is refused before anything is searched."""

import pytest

from realrl import cli
from realrl.errors import AllocationError
from realrl.search.methods import METHODS, Method

TWO = ("preset=tiny", "cluster.n_devices_per_node=2", "n_seqs=16")


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(capsys, *arguments):
    """Return what `realrl plan ppo` prints with these arguments."""
    assert cli.main(["plan", "ppo", *TWO, *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The file of a plan with all calls on both workers."""
    path = tmp_path_factory.mktemp("plan") / "everywhere.yaml"
    pins = [f"allocation.calls.{name}=d2@0:0-1" for name in ("actor_gen", "actor_train", "critic_train", "ref_inf")]
    assert cli.main(["plan", "ppo", *TWO, *pins, "--out", str(path)]) == 0
    return path


def test_all_questions_at_once(capsys, made, workplace):
    told = plan(
        capsys, "--explain", "actor_train", "--why", "actor_gen=d1@0:1", "--why", "actor_gen=t2@0:0-1",
        "--compare", "best", made, "--page", "plan.html",
    )  # fmt: skip
    assert "What its time is made of" in told
    assert "What is nearest to it" in told
    assert "a step would take" in told
    assert "The best plan with actor_gen=d1t1p1@0:1 takes" in told
    assert "What differs" in told or "Their settings are the same." in told
    assert "wrote plan.html" in told
    page = (workplace / "plan.html").read_text()
    assert page.startswith("<!doctype html>")
    assert "Other plans" in page


def test_every_call_is_explained(capsys):
    """An override behind the option is none of its calls."""
    told = plan(capsys, "--explain", "seed=3")
    assert "Why these places" in told
    for name in ("actor_gen", "rew_inf", "ref_inf", "critic_inf", "actor_train", "critic_train"):
        assert name in told.partition("Why these places")[2]


def test_a_method_without_a_plan(capsys, monkeypatch):
    def place(problem, seed):
        raise AllocationError("method 'split' has no plan that fits")

    monkeypatch.setitem(METHODS, "split", Method("split", "", "", place))
    told = plan(capsys, "--compare", "best", "split")
    assert "There is nothing to compare: method 'split' has no plan that fits." in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--explain", "actor_gan"), "--explain actor_gan: there is no such call. Did you mean 'actor_gen'"),
        (("--why", "actor_gan=d1@0:0"), "--why actor_gan: there is no such call. Did you mean 'actor_gen'"),
        (("--why", "actor_gen"), "--why actor_gen: a place is missing"),
        (("--why", "actor_gen=x3@0:0"), "'x3' is not a parallel strategy"),
        (("--compare", "best", "bext"), "--compare bext: there is no such plan. Did you mean 'best'?"),
        (("--compare", "best"), "expected 2 arguments"),
        (("--compare", "best", "none.yaml"), "--compare none.yaml"),
        (("--page", "page.txt"), "--page page.txt: a page is HTML"),
        (("--page", "none/page.html"), "--page none/page.html cannot be written: its folder does not exist"),
    ],
)
def test_refused_before_the_search(capsys, monkeypatch, arguments, message):
    def search(*_, **__):
        raise AssertionError("it is searched")

    monkeypatch.setattr("realrl.planner.planner.Planning.run", search)
    assert cli.main(["plan", "ppo", *TWO, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_page_of_a_simulation(capsys, workplace):
    assert cli.main(["simulate", "ppo", *TWO, "allocation=split", "--steps", "2", "--page", "page.html"]) == 0
    page = (workplace / "page.html").read_text()
    assert "Other plans" not in page
    assert "room of a device" in page or "a chart is" in page
    assert cli.main(["simulate", "ppo", *TWO, "--page", "page.pdf"]) == 2
    assert "a page is HTML" in capsys.readouterr().err
