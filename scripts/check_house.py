"""Rules of the house that no other tool checks: sizes, imports, and names that may appear in one place only.

In realrl/ a folder has at most 15 files, a file at most 500 lines, a function at most 80 lines and 7 parameters.
Modules import each other in no circle, not even for types. No function imports from its own package, realrl/<folder>,
and nothing imports `pickle` or `unittest`. Only engine/ imports `torch.distributed`, and only
runtime/transport/ `zmq`. The words that choose a device or a collective backend stand in engine/device.py alone, except
for the layer that maps megatron-core's calls of CUDA to the CPU. Only cpu/ asks for the kind of CPU, and others
import `realrl.cpu` as a whole.
Scripts and tests may have longer files and functions, experiments shorter files.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import networkx as nx

KNOWN: frozenset[str] = frozenset()
"""Violations that are still to be corrected, as `Violation.key` writes them."""

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("realrl", "experiments", "scripts", "tests")
MAX_FOLDER_FILES = 15
MAX_PARAMETERS = 7
DEVICE_FILES = (
    "realrl/engine/device.py",
    "realrl/engine/backends/megatron_cpu.py",
    "realrl/engine/generate/cuda_graphs.py",
)
DEVICE_WORDS = re.compile(r"""\.cuda\b|["']nccl["']|["']gloo["']""")
CPU_WORDS = re.compile(r"\bmkldnn\b|get_cpu_capability")
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Limits:
    """Largest number of lines of a file and of a function."""

    file: int
    function: int


LIMITS = {
    "realrl": Limits(500, 80),
    "experiments": Limits(60, 100),
    "scripts": Limits(600, 100),
    "tests": Limits(600, 100),
}


@dataclass(frozen=True, order=True)
class Violation:
    """One rule broken in one place.

    Attributes:
        file: path of the file or folder from the root.
        line: number of the line; 0 for the file as a whole.
        what: description of the fault by names, which stays the same if lines are added above.
    """

    file: str
    line: int
    what: str

    @property
    def key(self) -> str:
        """The violation's name in `KNOWN`."""
        return f"{self.file}: {self.what}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}" if self.line else self.key


@dataclass(frozen=True)
class Source:
    """A parsed file.

    Attributes:
        name: path from the root, with slashes.
    """

    name: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, name: str, text: str) -> Source:
        return cls(name, text, ast.parse(text, name))

    @property
    def folder(self) -> str:
        """The top folder of the path."""
        return self.name.partition("/")[0]

    @property
    def module(self) -> str:
        """The name for imports of the file."""
        return self.name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Import:
    """An import in a file.

    Attributes:
        name: a module, or a name in one.
        function: name of the innermost function around the import; empty at module level.
    """

    name: str
    line: int
    function: str


# ---------------------------------------------------------------- sizes


def long_files_and_functions(source: Source) -> Iterator[Violation]:
    """Find files and functions with too many lines."""
    limits = LIMITS[source.folder]
    n_lines = source.text.count("\n")
    if n_lines > limits.file:
        yield Violation(source.name, 0, f"more than {limits.file} lines")
    for function in _functions(source.tree):
        n_lines = (function.end_lineno or function.lineno) - function.lineno + 1
        if n_lines > limits.function:
            yield Violation(source.name, function.lineno, f"{function.name} has more than {limits.function} lines")


def long_signatures(source: Source) -> Iterator[Violation]:
    """Find functions of realrl with too many parameters; `self` and `cls` do not count."""
    if source.folder != "realrl":
        return
    for function in _functions(source.tree):
        a = function.args
        names = [p.arg for p in (*a.posonlyargs, *a.args, a.vararg, *a.kwonlyargs, a.kwarg) if p is not None]
        n_parameters = len(names) - (names[:1] in (["self"], ["cls"]))
        if n_parameters > MAX_PARAMETERS:
            yield Violation(source.name, function.lineno, f"{function.name} has more than {MAX_PARAMETERS} parameters")


def full_folders(names: Iterable[str]) -> Iterator[Violation]:
    """Find folders of realrl with too many files, not counting those in subfolders.

    Args:
        names: paths of all files, Python or not.
    """
    n_files = Counter(str(PurePosixPath(name).parent) for name in names if name.startswith("realrl/"))
    for folder, n in sorted(n_files.items()):
        if n > MAX_FOLDER_FILES:
            yield Violation(folder, 0, f"more than {MAX_FOLDER_FILES} files")


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


# ---------------------------------------------------------------- imports


def imports(source: Source) -> Iterator[Import]:
    """Find all imports of a file, in functions and for types too."""
    for node, function in _import_nodes(source.tree, ""):
        base = f"{_base(node, source)}." if isinstance(node, ast.ImportFrom) else ""
        yield from (Import(f"{base}{alias.name}", node.lineno, function) for alias in node.names)


def circles(sources: Iterable[Source]) -> Iterator[Violation]:
    """Find modules of realrl that import each other at module level, also through others; one circle of each group."""
    files = {source.module: source for source in sources if source.folder == "realrl"}
    graph = nx.DiGraph()
    for module, source in files.items():
        wanted = (_module_of(found.name, files) for found in imports(source) if not found.function)
        graph.add_edges_from((module, other) for other in wanted if other in files and other != module)
    for group in sorted(map(sorted, nx.strongly_connected_components(graph))):
        if len(group) > 1:
            first = group[0]
            ways = [nx.shortest_path(graph, then, first) for then in sorted(graph[first]) if then in group]
            circle = " -> ".join([first, *min(ways, key=len)])
            yield Violation(files[first].name, 0, f"imports go in a circle: {circle}")


def hidden_imports(source: Source, modules: Container[str]) -> Iterator[Violation]:
    """Find imports inside a function of realrl from the same package, the first folder below realrl.

    Args:
        modules: names of all modules.
    """
    for found in imports(source):
        if found.function and source.folder == "realrl" and _package_of(found.name) == _package_of(source.module):
            module = _module_of(found.name, modules)
            yield Violation(source.name, found.line, f"{found.function} imports {module} of its own package")


def misplaced_imports(source: Source) -> Iterator[Violation]:
    """Find imports in realrl outside of the one place where they belong, and forbidden ones."""
    if source.folder != "realrl":
        return
    for found in imports(source):
        top = found.name.partition(".")[0]
        if found.name.startswith("torch.distributed") and not source.name.startswith("realrl/engine/"):
            yield Violation(source.name, found.line, "torch.distributed outside realrl/engine")
        if top == "zmq" and not source.name.startswith("realrl/runtime/transport/"):
            yield Violation(source.name, found.line, "zmq outside realrl/runtime/transport")
        if found.name.startswith("realrl.cpu.") and not source.name.startswith("realrl/cpu/"):
            part = found.name.split(".")[2]
            if (ROOT / "realrl" / "cpu" / f"{part}.py").is_file():
                yield Violation(source.name, found.line, "a part of realrl.cpu outside realrl/cpu")
        if top in ("pickle", "unittest"):
            yield Violation(source.name, found.line, f"imports {top}")


def _import_nodes(node: ast.AST, function: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, function
        else:
            yield from _import_nodes(child, child.name if isinstance(child, Function) else function)


def _base(node: ast.ImportFrom, source: Source) -> str:
    """The module after ``from``, with a relative one spelled out."""
    if not node.level:
        return node.module or ""
    parts = source.name.removesuffix(".py").split("/")[: -node.level]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _module_of(name: str, modules: Container[str]) -> str:
    return name if name in modules else name.rpartition(".")[0]


def _package_of(name: str) -> str:
    """The package of a module: its first two parts, like ``realrl.cli``."""
    return ".".join(name.split(".")[:2])


# ---------------------------------------------------------------- words


def misplaced_words(source: Source) -> Iterator[Violation]:
    """Find names of devices, collective backends and CPUs in realrl outside of the places that choose them."""
    if source.folder != "realrl" or source.name in DEVICE_FILES:
        return
    for number, line in enumerate(source.text.splitlines(), 1):
        if DEVICE_WORDS.search(line):
            yield Violation(source.name, number, "device and backend names belong to realrl/engine/device.py")
        if CPU_WORDS.search(line) and not source.name.startswith("realrl/cpu/"):
            yield Violation(source.name, number, "which CPU this is, only realrl/cpu asks")


# ---------------------------------------------------------------- all of it


def violations(texts: Mapping[str, str], names: Iterable[str]) -> list[Violation]:
    """Check all rules.

    Args:
        texts: path from the root -> content of all Python files.
        names: paths of all files.
    """
    sources = [Source.of(name, text) for name, text in texts.items()]
    modules = {source.module for source in sources}
    found = {*full_folders(names), *circles(sources)}
    for source in sources:
        found |= {*long_files_and_functions(source), *long_signatures(source), *misplaced_words(source)}
        found |= {*hidden_imports(source, modules), *misplaced_imports(source)}
    return sorted(found)


def repository_files() -> list[str]:
    """Paths of the files in `FOLDERS` that git does not ignore."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *FOLDERS]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.splitlines()
    return sorted({name for name in names if (ROOT / name).is_file()})


def main() -> int:
    """Print every violation that is not known; returns 1 if there is one."""
    names = repository_files()
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in names if name.endswith(".py")}
    found = violations(texts, names)
    new = [violation for violation in found if violation.key not in KNOWN]
    print("\n".join(map(str, new)) if new else "house: sizes, imports and places are in order")
    for key in sorted(KNOWN - {violation.key for violation in found}):
        print(f"no longer in need of KNOWN: {key}")
    return 1 if new else 0


if __name__ == "__main__":
    sys.exit(main())
