"""Code that only a GPU runs: which definitions were tested there, and which have changed since.

A definition is hashed by its syntax tree, without docstrings, comments and imports, and is known by its name. So moving
it, splitting or merging files and better words need no GPU; another operation does.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).parents[2]
RECORD = REPOSITORY / "results" / "gpu_checks.json"
PENDING = REPOSITORY / "results" / "gpu_pending.json"
_LEFT_OUT = ("ctx", "type_comment", "type_params", "kind", "type_ignores")
"""Fields of a syntax tree that say nothing, or that not every Python has."""


def gpu_files(root: Path = REPOSITORY) -> list[str]:
    """Return the files that hold GPU code, derived from what they import.

    That is `kernels/`, whatever imports triton or captures CUDA graphs, itself or by a helper, and whatever chooses
    between a module that imports triton and another one.
    """
    trees = {_module(path, root): _tree(path) for path in sorted((root / "marginlens").rglob("*.py"))}
    imports = {name: set(_imports(tree, trees)) for name, tree in trees.items()}
    kernels = {name for name in trees if name.startswith("marginlens.kernels") or "triton" in imports[name]}
    captures = {name for name in trees if _captures(trees[name])}
    helpers = {name for name in captures if not imports[name] & (kernels | captures)}
    direct = {name for name in kernels if "triton" in imports[name]}
    chooses = {name for name in trees if imports[name] & direct}
    chooses |= {name for name in trees if imports[name] & kernels and _names_triton(trees[name])}
    found = kernels | captures | chooses | {name for name in trees if imports[name] & helpers}
    return sorted(_file(name, root) for name in found)


def definitions(root: Path = REPOSITORY) -> dict[str, list[str]]:
    """Return the hashes of all definitions of GPU code by name; one name may stand in several files."""
    found: dict[str, list[str]] = {}
    for file in gpu_files(root):
        for name, digest in hashed((root / file).read_text()):
            found.setdefault(name, []).append(digest)
    return {name: sorted(digests) for name, digests in sorted(found.items())}


def hashed(source: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the hash of each top-level definition of a module."""
    for node in ast.parse(source).body:
        if _says_nothing(node) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)):
            continue
        yield _name(node), hashlib.sha256(_dump(node).encode()).hexdigest()[:16]


def moved() -> dict[str, str]:
    """Return each definition that was not tested on a GPU as it is now, with the file that it is in."""
    known = record()["definitions"]
    found = {}
    for file in gpu_files():
        for name, digest in hashed((REPOSITORY / file).read_text()):
            if digest not in known.get(name, ()):
                found[f"{name} in {file}"] = file
    return found


def record() -> dict[str, Any]:
    """Return what the last tests on a GPU said."""
    found: dict[str, Any] = json.loads(RECORD.read_text())
    return found


def pending() -> list[dict[str, str]]:
    """Return the definitions that wait for a GPU: name, file, the commit that was last tested, and why it changed."""
    found: list[dict[str, str]] = json.loads(PENDING.read_text()) if PENDING.exists() else []
    return found


def summary() -> str:
    """Return in a few words what was tested on a GPU."""
    files = {one["file"] for one in pending()}
    return f"GPU-verified at {record()['commit']}; {len(files)} file{'s' * (len(files) != 1)} pending"


def cpu_tests(file: str) -> list[str]:
    """Return the tests without a GPU that import a file, or GPU code that imports it.

    The interpreter runs its kernels there, or a twin is compared with it. What captures a graph for others has neither.
    """
    module, trees = _module(REPOSITORY / file, REPOSITORY), {}
    for other in gpu_files():
        trees[_module(REPOSITORY / other, REPOSITORY)] = _tree(REPOSITORY / other)
    if _captures(trees[module]) and not set(_imports(trees[module], trees)) & trees.keys():
        return []
    users: set[str] = {module}
    while more := {name for name, tree in trees.items() if name not in users and users & set(_imports(tree, trees))}:
        users |= more
    tests = [path for path in sorted((REPOSITORY / "tests").rglob("test_*.py")) if "gpu" not in path.parts]
    used = {path: set(_imports(_tree(path), users)) for path in tests}
    return [path.relative_to(REPOSITORY).as_posix() for path in tests if used[path] & users]


def _tree(path: Path) -> ast.Module:
    return _parsed(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1000)
def _parsed(path: Path, changed: int) -> ast.Module:
    return ast.parse(path.read_text())


def _module(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _file(module: str, root: Path) -> str:
    path = Path(*module.split("."))
    return (path.with_suffix(".py") if (root / path.with_suffix(".py")).exists() else path / "__init__.py").as_posix()


def _imports(tree: ast.AST, known: Any) -> Iterator[str]:
    """Yield the modules that a module imports, in functions too, but not for types alone."""
    for node in _without_types(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (full for alias in node.names if (full := f"{node.module}.{alias.name}") in known)


def _without_types(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)):
            yield child
            yield from _without_types(child)


def _captures(tree: ast.AST) -> bool:
    """Return True if a module captures CUDA graphs."""
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return bool(names & {"CUDAGraph", "make_graphed_callables"})


def _names_triton(tree: ast.AST) -> bool:
    """Return True if a module chooses Triton by its name in a comparison."""
    return any(
        isinstance(part, ast.Constant) and part.value == "triton"
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for part in ast.walk(node)
    )


def _says_nothing(node: ast.AST) -> bool:
    """Return True for imports, docstrings and texts below a name."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or isinstance(node, ast.Import | ast.ImportFrom)


def _name(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return ", ".join(ast.unparse(target) for target in targets)
    return type(node).__name__


def _dump(node: object) -> str:
    """Return a syntax tree as text, the same in every Python."""
    if isinstance(node, list):
        return f"[{','.join(_dump(x) for x in node if not (isinstance(x, ast.AST) and _says_nothing(x)))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = ((name, value) for name, value in ast.iter_fields(node) if name not in _LEFT_OUT)
    parts = (f"{name}={_dump(value)}" for name, value in fields if value not in (None, []))
    return f"{type(node).__name__}({','.join(parts)})"
