"""Docstrings open with a verb or a noun, never with a word that leaves the subject out."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
REFUSED = re.compile(r"(Of|That of|Those|The same|What|How|Whether)\b")


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yields the lines and texts of a file's docstrings, those of attributes included."""
    for node in ast.walk(ast.parse(file.read_text())):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else []:
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text


def test_openings_of_docstrings() -> None:
    refused = [
        f"{file.relative_to(ROOT)}:{line}: {text.strip().splitlines()[0]}"
        for folder in ("zerojax", "pallas_kernels", "benchmarks")
        for file in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(file)
        if REFUSED.match(text.strip())
    ]
    remedy = 'write a verb ("Returns whether ...") or a noun'
    assert not refused, f"{remedy}:\n" + "\n".join(refused)
