"""What the docstring of an example promises."""

import ast
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
NUMBER = re.compile(r"(\S.* )(\d+\.\d+)")


def promised(path: Path) -> tuple[str, float]:
    """The last line of its output as its docstring has it, indented: words, number."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    return numbered(next(line[4:] for line in docstring.splitlines() if line.startswith("    ")))


def numbered(line: str) -> tuple[str, float]:
    match = NUMBER.fullmatch(line)
    assert match, line
    return match[1], float(match[2])
