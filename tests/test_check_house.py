"""Each rule of the house, broken by a few lines, and kept by a few others."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from scripts.check_house import Violation, repository_files, violations


def broken(files: dict[str, str], others: Iterable[str] = ()) -> list[str]:
    """Return what is said about a repository of these Python files and some others, of which only the names matter."""
    return [str(violation) for violation in violations(files, [*files, *others])]


def function(n_lines: int) -> str:
    return "def f():\n" + "    x = 1\n" * (n_lines - 1)


# ---------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("name", "limit"),
    [("realrl/a/b.py", 500), ("experiments/ppo.py", 60), ("scripts/a.py", 600), ("tests/a/test_b.py", 600)],
)
def test_a_file_has_a_limit_of_lines(name: str, limit: int) -> None:
    assert broken({name: "x = 1\n" * limit}) == []
    assert broken({name: "x = 1\n" * (limit + 1)}) == [f"{name}: more than {limit} lines"]


@pytest.mark.parametrize(("name", "limit"), [("realrl/a/b.py", 80), ("scripts/a.py", 100), ("tests/test_b.py", 100)])
def test_a_function_has_a_limit_of_lines(name: str, limit: int) -> None:
    assert broken({name: function(limit)}) == []
    assert broken({name: "\n" + function(limit + 1)}) == [f"{name}:2: f has more than {limit} lines"]


def test_async_functions_and_methods_are_functions() -> None:
    method = "class A:\n" + "".join(f"    {line}\n" for line in ("async " + function(81)).splitlines())
    assert broken({"realrl/a.py": method}) == ["realrl/a.py:2: f has more than 80 lines"]


@pytest.mark.parametrize(
    "parameters",
    [
        "a, b, c, d, e, f, g, h",
        "a, b, /, c, d, *, e, f, g, h",
        "a, b, c, d, e, f, *g, **h",
        "a, b, c, d, e, f, g, self",
    ],
)
def test_a_function_has_at_most_seven_parameters(parameters: str) -> None:
    text = f"def f({parameters}): ...\n"
    assert broken({"realrl/a.py": text}) == ["realrl/a.py:1: f has more than 7 parameters"]
    assert broken({"scripts/a.py": text}) == []


@pytest.mark.parametrize(
    "parameters", ["a, b, c, d, e, f, g", "self, a, b, c, d, *, e, f, g", "cls, *, a, b, c, d, e, f, g"]
)
def test_self_and_cls_are_no_parameters(parameters: str) -> None:
    assert broken({"realrl/a.py": f"def f({parameters}): ...\n"}) == []


def test_a_folder_has_at_most_fifteen_files_of_any_kind() -> None:
    files = {f"realrl/a/b{i}.py": "" for i in range(14)}
    inside = [f"realrl/a/c/d{i}.txt" for i in range(15)]
    assert broken(files, ["realrl/a/kernel.cpp", *inside]) == []
    assert broken(files, ["realrl/a/kernel.cpp", "realrl/a/page.html"]) == ["realrl/a: more than 15 files"]
    assert broken({}, [f"tests/a/test_{i}.py" for i in range(16)]) == []


# ---------------------------------------------------------------- circles


def circle(*names: str) -> str:
    return f"realrl/{names[0]}.py: imports go in a circle: " + " -> ".join(f"realrl.{name}" for name in names)


def test_two_modules_do_not_import_each_other() -> None:
    files = {"realrl/a.py": "import realrl.b\n", "realrl/b.py": "from realrl.a import x\n"}
    assert broken(files) == [circle("a", "b", "a")]


def test_a_circle_may_be_long_and_is_reported_once() -> None:
    files = {
        "realrl/a.py": "from realrl import b\n",
        "realrl/b.py": "from .c import x\n",
        "realrl/c.py": "from . import a, d\n",
        "realrl/d.py": "",
    }
    assert broken(files) == [circle("a", "b", "c", "a")]


@pytest.mark.parametrize(
    "text",
    [
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from realrl.b import B\n",
        "try:\n    from realrl.b import B\nexcept ImportError:\n    B = None\n",
        "class A:\n    from realrl.b import B\n",
    ],
)
def test_imports_in_a_block_at_module_level_count(text: str) -> None:
    assert broken({"realrl/a.py": text, "realrl/b.py": "import realrl.a\n"}) == [circle("a", "b", "a")]


def test_a_name_of_a_package_is_imported_from_the_package() -> None:
    package = "from realrl.p.x import X\n"
    files = {"realrl/p/__init__.py": package, "realrl/p/x.py": "from realrl.p import y\n", "realrl/p/y.py": ""}
    assert broken(files) == []
    files["realrl/p/y.py"] = "from realrl.p import X\n"
    assert broken(files) == [
        "realrl/p/__init__.py: imports go in a circle: realrl.p -> realrl.p.x -> realrl.p.y -> realrl.p"
    ]


def test_what_a_function_imports_makes_no_circle() -> None:
    files = {"realrl/a/x.py": "def f():\n    import realrl.b.y\n", "realrl/b/y.py": "import realrl.a.x\n"}
    assert broken(files) == []


# ---------------------------------------------------------------- imports


@pytest.mark.parametrize(
    "statement", ["import realrl.a.y", "from realrl.a import y", "from realrl.a.y import Y", "from .y import Y"]
)
def test_no_function_imports_from_its_own_package(statement: str) -> None:
    files = {"realrl/a/x.py": f"class A:\n    def f(self):\n        {statement}\n", "realrl/a/y.py": ""}
    assert broken(files) == ["realrl/a/x.py:3: f imports realrl.a.y of its own package"]


def test_folders_inside_a_package_are_the_same_package() -> None:
    files = {"realrl/a/b/x.py": "def f():\n    import realrl.a.c.y\n", "realrl/a/c/y.py": ""}
    assert broken(files) == ["realrl/a/b/x.py:2: f imports realrl.a.c.y of its own package"]


def test_a_function_may_import_from_another_package() -> None:
    files = {"realrl/a/x.py": "def f():\n    import torch\n    from realrl.b.y import Y\n", "realrl/b/y.py": ""}
    assert broken(files) == []
    assert broken({"tests/x.py": "def f():\n    import tests.y\n", "tests/y.py": ""}) == []


@pytest.mark.parametrize("statement", ["import unittest", "from unittest import mock", "import unittest.mock as m"])
def test_no_unittest_in_realrl(statement: str) -> None:
    assert broken({"realrl/a.py": f"{statement}\n"}) == ["realrl/a.py:1: imports unittest"]
    assert broken({"tests/a.py": f"{statement}\n"}) == []


def test_no_pickle_in_realrl() -> None:
    assert broken({"realrl/a.py": "def f():\n    from pickle import loads\n"}) == ["realrl/a.py:2: imports pickle"]


@pytest.mark.parametrize(
    "statement",
    ["import torch.distributed as dist", "from torch import distributed", "from torch.distributed import rpc"],
)
def test_torch_distributed_is_for_the_engine(statement: str) -> None:
    found = ["realrl/runtime/a.py:1: torch.distributed outside realrl/engine"]
    assert broken({"realrl/runtime/a.py": statement}) == found
    assert broken({"realrl/engine/a.py": statement}) == []


def test_zmq_is_for_the_transport() -> None:
    files = {"realrl/runtime/transport/zmq.py": "import zmq\n", "realrl/runtime/a.py": "from zmq import asyncio\n"}
    assert broken(files) == ["realrl/runtime/a.py:1: zmq outside realrl/runtime/transport"]


@pytest.mark.parametrize("words", ["torch.cuda.synchronize()", "x = 'nccl'", 'y = "gloo"'])
def test_devices_are_chosen_in_one_file(words: str) -> None:
    found = ["realrl/engine/a.py:1: device and backend names belong to realrl/engine/device.py"]
    assert broken({"realrl/engine/a.py": words}) == found
    assert broken({"realrl/engine/device.py": words}) == []


# ---------------------------------------------------------------- places


def test_a_violation_keeps_its_key_when_lines_are_added_above() -> None:
    assert Violation("realrl/a.py", 3, "f is long").key == Violation("realrl/a.py", 9, "f is long").key


def test_the_files_are_those_that_git_does_not_ignore() -> None:
    names = repository_files()
    assert {"realrl/errors.py", "realrl/py.typed", "scripts/check_house.py"} <= set(names)
    assert not [name for name in names if "__pycache__" in name]
