"""Docstrings as mkdocstrings reads them.

Roles and literal blocks of reStructuredText become code, a section "Example" becomes
"Examples".
"""

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
    title = "For instance" if title == "Example" else f"{title}, for instance"
    return f"{indent}{title}:\n\n{indent}```python\n{code}\n{indent}```\n"


EXAMPLE = re.compile(r"^( *)Example:", re.MULTILINE)


class Roles(griffe.Extension):
    """Applies all three to every docstring."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of an object, if it has one."""
        if obj.docstring is not None:
            text = ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(
                r"\1Examples:", LITERAL.sub(_fenced, text)
            )
