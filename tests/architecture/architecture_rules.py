"""Architecture rules as data and as functions from sources to a list of offenders."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import qfleet
from qfleet.config import Config

TOP_LEVEL = {"", "__main__", "api"}
"""The only modules that are not in a package."""

VERSION = ("qfleet", "qfleet.__version__")
"""Imports that any module may make to know the version."""

KERNELS = "accel.kernels"
"""A subpackage with a place of its own in the graph: networks use it, and it knows nothing but core."""

ROLES = {"actor", "learner", "sync", "accel"}
"""Packages that `roles` stands for in docs/design.md."""

SHARED = {"core", "config"}
"""Packages that nearly all others may import."""

PACKAGES: dict[str, set[str]] = {
    "core": set(), "config": {"core"}, "maths": {"core"}, "process": {"core"}, KERNELS: {"core"},
    "explore": SHARED, "envs": SHARED, "runs": SHARED, "replay": {*SHARED, "maths"},
    "networks": {*SHARED, KERNELS}, "algos": {*SHARED, "maths", "networks"},
    "accel": {*SHARED, "replay"}, "optim": {*SHARED, KERNELS, "maths"}, "sync": {*SHARED, "maths", "optim"},
    "learner": {*SHARED, "accel", "optim", "sync"}, "actor": {*SHARED, "maths", "replay", "accel", "optim"},
    "transport": {*SHARED, "process", "replay", "sync"},
    "training": {*SHARED, "explore", "optim", "replay", "runs", "transport", *ROLES},
    "runconfig": {*SHARED, "algos", "envs", "replay", "runs", "transport", "training", "accel", "learner", "optim",
                  "sync"},
    "report": {*SHARED, "explore", "replay", "runs", "training", "runconfig", "accel", "actor"},
    "deploy": {*SHARED, "envs", "runs"},
    "launch": {*SHARED, "process", "replay", "runs", "transport", "training", "runconfig", "report", "optim", *ROLES},
    "interface": {*SHARED, "launch", "deploy", "envs", "runs", "training", "runconfig", "report", "actor"}}
"""Package -> the packages that it may import. Actor, learner, replay, sync and transport know no algorithm, network or
environment suite."""

PACKAGES["api"] = {*PACKAGES["launch"], "interface", "launch", "explore", "deploy", "envs"}
PACKAGES["tuning"] = {*SHARED, "interface", "launch", "process", "report", "runconfig", "runs"}
PACKAGES["cli"] = {*PACKAGES["api"], "api", "tuning"}
PACKAGES["__main__"] = {"cli", "process"}
PACKAGES[""] = {"api", "tuning"}

CONFINED: dict[str, tuple[str, ...]] = {
    "multiprocessing": ("process",), "torch.multiprocessing": ("process",), "grpc": ("transport", "launch"),
    "ray": ("transport", "launch"),
    "subprocess": ("process", "launch", "envs.env_process", "runs.directory", "runs.machine"),
    "torch.distributed": ("sync.process_group",),
    **dict.fromkeys(["pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"], ())}
"""Module -> the only packages, or modules, that may import it."""

FORBIDDEN_CALLS = {"torch.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "yaml.load_all",
                   "yaml.unsafe_load_all", "yaml.full_load_all", "eval", "exec"}
"""Calls that run what they read. numpy.load is allowed with a literal allow_pickle=False."""

NAMELESS = {"Manager", "Helper", "Helpers", "Util", "Utils", "Base", "Mixin"}
NOT_A_USE = ("config.", "runconfig.describe.", "runconfig.resolution.", "runconfig.resumable.")
"""Modules that validate and describe fields: a field read nowhere else has no effect."""

MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_DEPTH, MAX_ARGUMENTS = 399, 39, 2, 8
ROOT = "qfleet.config.schema.Config"
"""The model that all config sections are subclasses of: depth is counted from it."""


@dataclass(frozen=True)
class Source:
    """One file of the package. `inner` is its name below qfleet, "" for qfleet itself."""

    module: str
    package: bool
    text: str

    @property
    def tree(self) -> ast.Module:
        return parsed(self.text)

    @property
    def inner(self) -> str:
        return self.module.partition(".")[2]


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def library() -> tuple[Source, ...]:
    root = Path(qfleet.__file__).parent
    found = []
    for path in sorted(root.rglob("*.py")):
        parts = ["qfleet", *path.relative_to(root).with_suffix("").parts]
        package = parts[-1] == "__init__"
        found.append(Source(".".join(parts[:-1] if package else parts), package, path.read_text()))
    return tuple(found)


@cache
def scripts() -> tuple[Source, ...]:
    """The package of scripts that compares speed, which imports the library and is not imported by it."""
    root = Path(qfleet.__file__).parents[1] / "benchmarks"
    paths = [root / "bench.py", *sorted((root / "speed").rglob("*.py"))]
    return tuple(Source(".".join(["benchmarks", *path.relative_to(root).with_suffix("").parts]),
                        path.stem == "__init__", path.read_text()) for path in paths)


def sources(**texts: str) -> tuple[Source, ...]:
    """Sources for the self-tests: `actor__actor="..."` is qfleet/actor/actor.py."""
    return tuple(Source(f"qfleet.{name.replace('__', '.')}", False, text) for name, text in texts.items())


def imports(source: Source) -> Iterator[tuple[int, str, str]]:
    """(line, local name, dotted target) of every import, also of those inside functions."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                # `import a.b` binds a, `import a.b as c` binds a.b
                yield node.lineno, alias.asname or alias.name.partition(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            stem = node.module or ""
            if node.level:
                here = source.module.split(".") + ["__init__"] * source.package
                stem = ".".join([*here[:len(here) - node.level], *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, alias.asname or alias.name, f"{stem}.{alias.name}"


def package_of(module: str) -> str:
    """The package of a module below qfleet, as `PACKAGES` names it."""
    inner = module.partition(".")[2]
    return KERNELS if f"{inner}.".startswith(f"{KERNELS}.") else inner.partition(".")[0]


def misdirected(files: Iterable[Source]) -> list[str]:
    """Imports that the package graph does not allow, and files that belong to no package of it."""
    offenders = []
    for file in files:
        package = package_of(file.module)
        alone = "." not in file.inner and not file.package
        if package not in PACKAGES or (alone and file.inner not in TOP_LEVEL):
            offenders.append(f"{file.module}: belongs to no package of the graph")
            continue
        for line, _, target in imports(file):
            other = package_of(target)
            allowed = other in PACKAGES[package] | {package} or target in VERSION
            if target.split(".")[0] == "qfleet" and not allowed:
                offenders.append(f"{file.module}:{line}: {package or 'qfleet'} may not import {target}")
    return offenders


def unused_edges(files: Iterable[Source]) -> list[str]:
    """Edges of the package graph without an import. The packages at the top may import whatever is below them."""
    used = {(package_of(file.module), package_of(target)) for file in files for _, _, target in imports(file)}
    return [f"{package}: imports nothing of {other}" for package, others in PACKAGES.items()
            if package not in ("api", "cli") for other in sorted(others - SHARED) if (package, other) not in used]


def cyclic(files: Iterable[Source]) -> list[str]:
    """Modules that import each other in a circle at import time."""
    files = list(files)
    known = {file.module for file in files}
    graph = {file.module: {found for target in imported_at_once(file.tree) for found in [resolved(target, known)]
                           if found and found != file.module} for file in files}
    while graph:
        leaves = {module for module, targets in graph.items() if not targets & graph.keys()}
        if not leaves:
            return [f"{module}: imports in a circle" for module in sorted(graph)]
        graph = {module: targets for module, targets in graph.items() if module not in leaves}
    return []


def imported_at_once(tree: ast.Module) -> Iterator[str]:
    """Dotted targets of the absolute imports of a module that run when it is imported itself."""
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def resolved(target: str, known: set[str]) -> str:
    """The module that a dotted name means; the package itself only provides names."""
    while target and target not in known:
        target = target.rpartition(".")[0]
    return "" if target == "qfleet" else target


def shared_names(files: Iterable[Source]) -> list[str]:
    """Public classes with the same name. Every algorithm and exploration has its own `Config` and `Network`."""
    places: dict[str, list[str]] = {}
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(file.module)
    return [f"{name}: {', '.join(modules)}" for name, modules in places.items()
            if len(modules) > 1 and name not in ("Config", "Network")]


def unconfined(files: Iterable[Source]) -> list[str]:
    """Imports of modules that only some packages may import."""
    offenders = []
    for file in files:
        for line, _, target in imports(file):
            for module, places in CONFINED.items():
                created_here = any(f"{file.inner}.".startswith(f"{place}.") for place in places)
                if f"{target}.".startswith(f"{module}.") and not created_here:
                    offenders.append(f"{file.module}:{line}: {module} is for {' and '.join(places) or 'nobody'}")
    return offenders


def dotted(node: ast.expr, names: Mapping[str, str]) -> str:
    """What an expression such as `np.load` means, given the file's imports; "" if it is not a plain name."""
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        stem = dotted(node.value, names)
        return f"{stem}.{node.attr}" if stem else ""
    return ""


def unsafe(files: Iterable[Source]) -> list[str]:
    """Calls that execute what they read; a mention without a call counts, too."""
    offenders = []
    for file in files:
        names = {local: target for _, local, target in imports(file) if "." in target or local != target}
        allowed = {id(node.func) for node in ast.walk(file.tree) if isinstance(node, ast.Call)
                   and any(k.arg == "allow_pickle" and isinstance(k.value, ast.Constant) and k.value.value is False
                           for k in node.keywords)}
        for node in ast.walk(file.tree):
            read = isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Load)
            name = dotted(node, names) if read else ""
            if name in FORBIDDEN_CALLS and not (name == "numpy.load" and id(node) in allowed):
                offenders.append(f"{file.module}:{node.lineno}: {name}")
            wide = isinstance(node, ast.keyword) and node.arg == "allow_pickle"
            if wide and not (isinstance(node.value, ast.Constant) and node.value.value is False):
                offenders.append(f"{file.module}:{node.value.lineno}: allow_pickle")
    return offenders


def long_files(files: Iterable[Source]) -> list[str]:
    sizes = {file.module: len(file.text.splitlines()) for file in files}
    return [f"{name}: {size} lines" for name, size in sizes.items() if size > MAX_FILE_LINES]


def functions(file: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(file.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def long_functions(files: Iterable[Source]) -> list[str]:
    """Functions too long from `def` to their end, the docstring not counted."""
    offenders = []
    for file in files:
        for node in functions(file):
            size = (node.end_lineno or 0) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                size -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
            if size > MAX_FUNCTION_LINES:
                offenders.append(f"{file.module}:{node.lineno}: {node.name} has {size} lines")
    return offenders


def wide_constructors(files: Iterable[Source]) -> list[str]:
    offenders = []
    for file in files:
        for node in functions(file):
            given = node.args
            count = len(given.posonlyargs + given.args + given.kwonlyargs) - 1
            count += (given.vararg is not None) + (given.kwarg is not None)
            if node.name == "__init__" and count > MAX_ARGUMENTS:
                offenders.append(f"{file.module}:{node.lineno}: __init__ takes {count} arguments")
    return offenders


def bad_names(files: Iterable[Source]) -> list[str]:
    """Classes and files named after what they are to others, not after what they are."""
    offenders = []
    for file in files:
        classes = [node.name for node in ast.walk(file.tree) if isinstance(node, ast.ClassDef)]
        for name in [*classes, file.module.rpartition(".")[2]]:
            words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+", name)
            if NAMELESS & {word.capitalize() for word in words}:
                offenders.append(f"{file.module}: {name}")
    return offenders


def too_deep(files: Iterable[Source]) -> list[str]:
    """Classes with more than one ancestor of ours above one another; config sections count from their root."""
    files = list(files)
    names = {file.module: {local: target for _, local, target in imports(file)} for file in files}
    parents: dict[str, list[str]] = {}
    for file in files:
        for node in ast.walk(file.tree):
            if isinstance(node, ast.ClassDef):
                bases = [base.value if isinstance(base, ast.Subscript) else base for base in node.bases]
                parents[f"{file.module}.{node.name}"] = [dotted(base, {}) for base in bases]

    def found(module: str, name: str) -> str:
        """The class that `name` means in `module`, followed through re-exports; "" if it is not ours."""
        if f"{module}.{name}" in parents:
            return f"{module}.{name}"
        head, _, rest = name.partition(".")
        target = names.get(module, {}).get(head, "")
        target = f"{target}.{rest}" if rest and target else target
        owner, _, last = target.rpartition(".")
        return found(owner, last) if owner in names else ""

    def depth(name: str) -> int:
        if name == ROOT:
            return 0
        above = [found(name.rpartition(".")[0], base) for base in parents[name]]
        return 1 + max((depth(base) for base in above if base and base != name), default=0)

    return [f"{name}: depth {depth(name)}" for name in parents if depth(name) > MAX_DEPTH]


def unfinished(files: Iterable[Source]) -> list[str]:
    return [f"{file.module}:{number}: {line.strip()}" for file in files
            for number, line in enumerate(file.text.splitlines(), 1) if re.search(r"\b(TODO|FIXME|XXX)\b", line)]


def sections() -> list[type[Config]]:
    """All config sections of the package."""
    for file in library():
        if file.inner != "__main__":
            importlib.import_module(file.module)
    found, queue = [], [Config]
    while queue:
        below = [model for model in queue.pop().__subclasses__() if model.__module__.startswith("qfleet.")]
        found += below
        queue += below
    return found


def undescribed(models: Iterable[type[Config]]) -> list[str]:
    return [f"{model.__module__}.{model.__qualname__}.{name}" for model in models
            for name, field in model.model_fields.items() if not (field.description or is_section(field.annotation))]


def is_section(kind: object) -> bool:
    """A field that is a section is described by the section's docstring."""
    return isinstance(kind, type) and issubclass(kind, Config) and bool(inspect.getdoc(kind))


def own_fields(node: ast.ClassDef) -> Iterator[str]:
    """The fields that a section defines. A Literal of one value offers no choice, so there is nothing to read yet."""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            kind = line.annotation
            literal = isinstance(kind, ast.Subscript) and dotted(kind.value, {}).endswith("Literal")
            if not (literal and isinstance(kind, ast.Subscript) and isinstance(kind.slice, ast.Constant)):
                yield line.target.id


def reads(node: ast.AST) -> Iterator[tuple[str, int]]:
    """(name, line) of every attribute read below a node: as `.name`, or as the text in getattr(_, "name")."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Load):
            yield inner.attr, inner.lineno
        elif isinstance(inner, ast.Call) and isinstance(inner.func, ast.Name) and inner.func.id == "getattr":
            yield from ((text.value, inner.lineno) for text in inner.args[1:2]
                        if isinstance(text, ast.Constant) and isinstance(text.value, str))


def unread(files: Iterable[Source], models: Iterable[type[Config]]) -> list[str]:
    """Fields that nobody reads but validation and the class itself; its methods count if somebody calls them."""
    files, known = list(files), {(model.__module__, model.__name__) for model in models}
    everywhere = [(name, file.module, line) for file in files if not f"{file.inner}.".startswith(NOT_A_USE)
                  for name, line in reads(file.tree)]
    offenders = []
    for file in files:
        for node in ast.walk(file.tree):
            if not (isinstance(node, ast.ClassDef) and (file.module, node.name) in known):
                continue
            inside = range(node.lineno, (node.end_lineno or 0) + 1)
            used = {name for name, module, line in everywhere if module != file.module or line not in inside}
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef) and method.name in used]
            used |= {name for method in methods for name, _ in reads(method)}
            offenders += [f"{file.module}.{node.name}.{name}" for name in own_fields(node) if name not in used]
    return offenders


RULES = (misdirected, cyclic, shared_names, unconfined, unsafe, long_files, long_functions, wide_constructors,
         bad_names, too_deep, unfinished)
"""The rules that need nothing but the sources."""

SCRIPT_RULES = tuple(rule for rule in RULES if rule not in (misdirected, unconfined))
"""Those that hold for scripts, too: these have no layers, and may start processes."""
