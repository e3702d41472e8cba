"""Docstrings as mkdocstrings reads them.

Roles and literal blocks of reStructuredText become code, formulas of LaTeX plain text,
a section "Example" becomes "Examples".
"""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
LITERAL = re.compile(r"^( *)(\S[^\n]*):: *\n\n((?:\1 +[^\n]*\n?|\n)+)", re.MULTILINE)
MATH = re.compile(r":math:`([^`]+)`")
FORMULA = re.compile(
    r"^( *)\.\. math::( [^\n]+\n|\s*\n(?:\1 +[^\n]*(?:\n|\Z))+)", re.MULTILINE
)
SIGNS = {
    r"\leftarrow": "←",
    r"\cdot": "·",
    r"\sum": "Σ",
    r"\ell": "l",
    r"\lVert": "‖",
    r"\rVert": "‖",
    r"\|": "‖",
    r"\tfrac{1}{2}": "1/2",
    "^2": "²",
}
"""LaTeX, and what stands for it in text."""


def _plain(latex: str) -> str:
    """Returns a formula as text: y_{i, :} stays an index, 10^{-6} becomes 10^(-6)."""
    for sign, text in SIGNS.items():
        latex = latex.replace(sign, text)
    latex = re.sub(r"\\[,;]|\\quad", " ", latex)
    latex = re.sub(r"\\(?:operatorname|mathrm|text)\{(\w+)\}", r"\1", latex)
    latex = re.sub(r"\^\{([^}]*)\}", r"^(\1)", latex)
    latex = re.sub(r"_\{(\w+)\}", r"_\1", latex)
    return " ".join(re.sub(r"\\(\w+)", r"\1", latex).split())


def _formula(match: re.Match[str]) -> str:
    indent, latex = match.groups()
    return f"{indent}```text\n{indent}{_plain(latex)}\n{indent}```\n"


def _fenced(match: re.Match[str]) -> str:
    indent, title, body = match.groups()
    lines = body.rstrip().splitlines()
    depth = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    code = "\n".join(indent + line[depth:] for line in lines)
    title = "For instance" if title == "Example" else f"{title}, for instance"
    return f"{indent}{title}:\n\n{indent}```python\n{code}\n{indent}```\n"


EXAMPLE = re.compile(r"^( *)Example:", re.MULTILINE)


def readable(text: str) -> str:
    """Returns a docstring of reStructuredText as Markdown."""
    text = FORMULA.sub(_formula, MATH.sub(lambda m: f"`{_plain(m[1])}`", text))
    return EXAMPLE.sub(r"\1Examples:", LITERAL.sub(_fenced, ROLE.sub(r"`\1`", text)))


class Roles(griffe.Extension):
    """Applies all of them to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)
