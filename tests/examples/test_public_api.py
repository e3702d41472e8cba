"""The examples use zerojax as its users do: by its public names."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import zerojax

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "examples").rglob("*.py"))


def names_of_zerojax(path: Path) -> Iterator[str]:
    """Modules that a file imports from, and members of `zerojax` itself that it names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module == "zerojax":
            yield from (f"zerojax.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}" if node.value.id == "zerojax" else ""


def is_public(name: str) -> bool:
    package, _, rest = name.partition(".")
    if package != "zerojax" or not rest:
        return True
    if rest in ("checkpoint", "models", "weights") or rest.startswith(("models.", "generation.")):
        return True
    return "." not in rest and not inspect.ismodule(getattr(zerojax, rest))


def test_only_public_names_are_used() -> None:
    for path in FILES:
        assert [name for name in names_of_zerojax(path) if not is_public(name)] == []
