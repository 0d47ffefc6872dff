"""Import of a user's objects: ``"package.module:object"``, ``"package.module.object"`` or ``"path/to/file.py:object"``.

Imports no torch. Modules in the working directory are found as they would be by ``python -m``.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

from realrl.errors import ConfigError, did_you_mean

SLOW_IMPORT_S = 10.0
OF_A_FILE = "realrl_user_"  # start of the names of modules that are files named by a configuration
_OURS = tuple(str(Path(__file__).resolve().parents[2] / name) + os.sep for name in ("realrl", "experiments"))
_NOT_OF_USERS = (
    "<",
    *_OURS,
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib", "scripts")),
)


@contextlib.contextmanager
def staying() -> Iterator[None]:
    """Make `os._exit` raise `SystemExit` while code of users runs: an exit code is not theirs to choose."""
    leave, own = os._exit, os.getpid()

    def refuse(status: int) -> None:
        if os.getpid() != own:  # a process that they forked
            leave(status)
        raise SystemExit(status)

    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = leave


@contextlib.contextmanager
def importing(what: str) -> Iterator[None]:
    """Say once that an import takes long, because code of users may never come to its end."""
    text = f"realrl: still importing {what} and what it imports ..."
    told = threading.Timer(SLOW_IMPORT_S, lambda: print(text, file=sys.stderr, flush=True))
    told.daemon = True
    told.start()
    try:
        yield
    finally:
        told.cancel()


def place_of_user(frame: FrameType | None) -> str | None:
    """Return ``file:line`` of the innermost frame in a user's file; None if there is none."""
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_OF_USERS):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of_function(function: object) -> str:
    """Return ``file:line`` of a function's first line; empty where Python cannot tell."""
    while hasattr(function, "func"):  # functools.partial
        function = function.func
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def place_of_user_function(function: object) -> str:
    """Return ``file:line`` of a function in a user's file; empty for any other."""
    place = place_of_function(function)
    return "" if place.startswith(_NOT_OF_USERS) else place


def files_of_users() -> list[str]:
    """Return the paths of files outside of Python, its packages and realrl that are imported now, sorted."""
    found = {str(getattr(module, "__file__", None) or "") for module in list(sys.modules.values())}
    return sorted(file for file in found if file.endswith(".py") and not file.startswith(_NOT_OF_USERS))


def load_object(name: str) -> Any:
    """Import the object that `name` refers to.

    Raises:
        ConfigError: the name has no such form, there is no such module, file or object, or the import needs a module
            that is missing.
    """
    where, attribute = split_name(name)
    module = _load_file(where) if where.endswith(".py") else _import(name, where)
    try:
        return getattr(module, attribute)
    except AttributeError:
        public = [n for n in vars(module) if not n.startswith("_")]
        raise ConfigError(
            f"{where!r} has no {attribute!r} (asked for as {name!r}).{did_you_mean(attribute, public)}"
        ) from None


def require_function(name: str, key: str) -> inspect.Signature | None:
    """Refuse a name whose module, file or object does not exist, from its source alone: nothing of it is run.

    Args:
        name: as for `load_object`.
        key: configuration key that holds the name, for the message.

    Returns:
        The signature of a plain function; None where only running the file would tell.

    Raises:
        ConfigError: the module or file is missing, is no Python, or binds no such name; names `key`.
    """
    where, attribute = split_name(name)
    file: str | None = where
    if where.endswith(".py"):
        found = os.path.isfile(where)
    else:
        find_working_directory()
        try:
            spec = importlib.util.find_spec(where) if all(map(str.isidentifier, where.split("."))) else None
        except ModuleNotFoundError:
            spec = None
        found, file = spec is not None, spec and spec.origin
    if not found:
        kind = "file" if where.endswith(".py") else "module"
        raise ConfigError(
            f"{key}={name!r}: there is no {kind} {where!r}{_searched(where)}",
            remedy="Write 'module:object' for a module that Python can import from here, or 'file.py:object'.",
        )
    if file is None or not file.endswith(".py"):
        return None
    try:
        tree = ast.parse(Path(file).read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError, OSError) as error:
        raise ConfigError(f"{key}={name!r}: '{file}' is no Python file: {error}") from error
    bound = list(_bindings(tree))
    definitions = [node for node in bound if _name_of(node) == attribute]
    if not definitions and not any(_name_of(node) in ("*", "__getattr__", "globals", "exec") for node in bound):
        public = [n for n in map(_name_of, bound) if not n.startswith("_")]
        raise ConfigError(f"{key}={name!r}: {where!r} has no {attribute!r}.{did_you_mean(attribute, public)}")
    [only] = definitions if len(definitions) == 1 else [None]
    if isinstance(only, ast.FunctionDef | ast.AsyncFunctionDef) and not only.decorator_list:
        return _signature(only.args)
    return None


def _bindings(node: ast.AST) -> Iterator[ast.AST]:
    """Yield definitions, imports and names at the top of a module, without entering functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Name | ast.alias):
            yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _bindings(child)


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.alias):
        return node.asname or node.name.partition(".")[0]
    if isinstance(node, ast.Name):
        return node.id if isinstance(node.ctx, ast.Store) or node.id in ("globals", "exec") else ""
    return str(getattr(node, "name", ""))


def _signature(arguments: ast.arguments) -> inspect.Signature:
    positional = [*arguments.posonlyargs, *arguments.args]
    n_required = len(positional) - len(arguments.defaults)
    kinds = [(arg.arg, inspect.Parameter.POSITIONAL_OR_KEYWORD, i < n_required) for i, arg in enumerate(positional)]
    if arguments.vararg is not None:
        kinds.append((arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL, True))
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        kinds.append((arg.arg, inspect.Parameter.KEYWORD_ONLY, default is None))
    if arguments.kwarg is not None:
        kinds.append((arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD, True))
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [inspect.Parameter(name, kind, default=empty if needed else None) for name, kind, needed in kinds]
    )


def check_reward_signature(signature: inspect.Signature, name: str) -> None:
    """Refuse a function that cannot be called with a prompt, a response and perhaps a row and the messages.

    Raises:
        TypeError: it takes too few or too many arguments, one that nothing gives, takes the response first, or needs an
            option.
    """
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = list(signature.parameters.values())
    named = [p for p in parameters if p.kind in positional]
    given = ("messages", "row", "metadata")
    required = [p for p in named[:3] if p.default is p.empty]
    required += [p for p in named[3:] if p.default is p.empty and p.name not in given]
    takes_more = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    missing = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty and p.name not in given]
    if len(required) > 3 or (len(named) < 2 and not takes_more):
        raise TypeError(f"{name!r} must take (prompt, response), and perhaps row and messages, not {_bare(parameters)}")
    if any(p.name.startswith("prompt") for p in named[1:2]):
        raise TypeError(f"{name!r} gets the prompt first: name its parameters (prompt, response), in this order")
    are_ids = [p.name.endswith("_ids") for p in named[:2]]
    if len(set(are_ids)) > 1:
        first, second = (p.name for p in named[:2])
        raise TypeError(
            f"{name!r} takes {first!r} and {second!r}: either both get token ids, as prompt_ids and response_ids, or "
            "both get text, as prompt and response"
        )
    if missing:
        raise TypeError(
            f"{name!r} needs the option {missing[0]!r}: give it a default, or name the function as "
            f"algorithm.rewards.NAME and set algorithm.rewards.NAME.options.{missing[0]}"
        )
    unknown = next((p.name for p in required[2:] if p.name not in given), None)
    if unknown is not None:
        raise TypeError(
            f"{name!r} takes {unknown!r}, which nothing gives it: besides prompt and response it may take row and "
            f"messages; a field of the dataset's row is row[{unknown!r}]"
        )


def check_parameters(function: Any, names: Sequence[str], what: str, *, is_method: bool = False) -> None:
    """Refuse a function that cannot be called with as many arguments as there are `names`.

    Args:
        function: one whose parameters Python cannot tell passes.
        what: the function, as the message calls it.
        is_method: True if it gets an instance first, which the message leaves out.

    Raises:
        ConfigError: says what it must take, and what it takes.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*([None] if is_method else []), *names)
    except TypeError:
        taken = _bare(list(signature.parameters.values())[is_method:])
        raise ConfigError(f"{what} must take ({', '.join(names)}), not {taken}") from None


def _bare(parameters: Sequence[inspect.Parameter]) -> inspect.Signature:
    """Return parameters without types and defaults, which may be secret."""
    empty = inspect.Parameter.empty
    return inspect.Signature([p.replace(default=empty, annotation=empty) for p in parameters])


def failed_in(error: BaseException) -> ConfigError | None:
    """Return an error that names the line of a user's file which raised `error`; None if no such file did."""
    line = line_that_raised(error)
    return ConfigError(_in_words(error), remedy=line) if line else None


def line_that_raised(error: BaseException) -> str:
    """Return ``file:line: text`` of the innermost line of a user's file that an error came through; empty for none."""
    frame = _frame_of_user(error)
    return "" if frame is None else f"{frame.filename}:{frame.lineno}: {(frame.line or '').strip()}"


def place_that_raised(error: BaseException) -> str:
    """Return ``file:line`` of the same; empty for none."""
    frame = _frame_of_user(error)
    return "" if frame is None else f"{frame.filename}:{frame.lineno}"


def _frame_of_user(error: BaseException) -> traceback.FrameSummary | None:
    frames = traceback.extract_tb(error.__traceback__)
    return next((frame for frame in reversed(frames) if not frame.filename.startswith(_NOT_OF_USERS)), None)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error; without realrl's own frames, where a user's file is among the others."""
    told = traceback.TracebackException.from_exception(error)
    each: traceback.TracebackException | None = told
    while each is not None:
        if any(not frame.filename.startswith(_NOT_OF_USERS) for frame in each.stack):
            each.stack[:] = [frame for frame in each.stack if not frame.filename.startswith(_OURS)]
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "".join(told.format())


def _in_words(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        return f"code of your own called exit({error.code!r}), which ends no run"
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg}"
    return "".join(traceback.format_exception_only(error)).strip()


def import_failed(what: str, error: BaseException) -> ConfigError:
    """Return an error for an import that failed; it names the line at fault, the last one that is a user's."""
    failed = failed_in(error)
    remedy = None if failed is None else failed.remedy
    if isinstance(error, SyntaxError):
        remedy = f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    return ConfigError(f"{what} cannot be imported: {_in_words(error)}", remedy=remedy)


def split_name(name: str) -> tuple[str, str]:
    """Split a name into "package.module" or "file.py", and "object".

    Raises:
        ConfigError: `name` has no such two parts.
    """
    where, _, attribute = name.rpartition(":" if ":" in name else ".")
    if ":" not in name and attribute == "py":
        raise ConfigError(f"{name!r} is a file and names no object in it", remedy=f"Write '{name}:object'.")
    if not where or not attribute:
        raise ConfigError(f"{name!r} names no object", remedy="Write 'module:object' or 'file.py:object'.")
    return where, attribute


def _import(name: str, module: str) -> ModuleType:
    find_working_directory()
    if not all(map(str.isidentifier, module.split("."))):
        raise ConfigError(f"there is no module {module!r} (asked for as {name!r})")
    try:
        with importing(module):
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and (module == error.name or module.startswith(error.name + ".")):
            raise ConfigError(f"there is no module {module!r} (asked for as {name!r})") from error
        raise ConfigError(f"{module!r} (asked for as {name!r}) needs a module that is missing: {error}") from error


def _searched(where: str) -> str:
    """Return the folder in which a file was looked for, as part of a sentence; nothing for modules and whole paths."""
    return f" in {os.getcwd()}" if where.endswith(".py") and not os.path.isabs(where) else ""


def _load_file(path: str) -> ModuleType:
    if not os.path.isfile(path):
        raise ConfigError(f"there is no file {path!r}{_searched(path)}")
    file = Path(path).resolve()
    module_name = f"{OF_A_FILE}{file.stem}_{abs(hash(str(file))):x}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    return execute_module(spec_of_file(module_name, file), module_name)


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compiles the source at every load: Python takes compiled code for that of a file that was changed within a second
    and has as many bytes as before."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def spec_of_file(name: str, path: Path) -> importlib.machinery.ModuleSpec:
    """Return what loads a user's file as a module."""
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    assert spec is not None
    return spec


def execute_module(spec: importlib.machinery.ModuleSpec, name: str) -> ModuleType:
    """Return a new module under `name`; one that raises leaves no trace, so that it can be loaded anew."""
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        with importing(spec.origin or name):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find_working_directory() -> None:
    """Let imports find modules in the current folder, as under ``python -m``."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
