"""Docstrings as Markdown: roles and literal blocks of reStructuredText become code."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:class|func|meth|mod):`~?([^`]+)`")
LITERAL = re.compile(r"^( *)(\S[^\n]*):: *\n\n((?:\1 +[^\n]*\n?|\n)+)", re.MULTILINE)


def _fenced(match: re.Match[str]) -> str:
    indent, title, body = match.groups()
    lines = body.rstrip().splitlines()
    depth = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    code = "\n".join(indent + line[depth:] for line in lines)
    return f"{indent}{title}, for instance:\n\n{indent}```python\n{code}\n{indent}```\n".replace(
        "Example, for instance:", "For instance:"
    )


class Roles(griffe.Extension):
    """Applies both to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object, if it has one."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = LITERAL.sub(_fenced, text)
