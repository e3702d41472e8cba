"""The notebook of a page: its code as code cells, all else as text cells."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FRONT_MATTER = re.compile(r"\A---\n.*?^---\n", re.S | re.M)
CODE = re.compile(r"^```python\n(.*?)^```$", re.S | re.M)
LINK = re.compile(r"\[([^\]]*)\]\((?!\w+:)([^)]+)\)")
ANCHOR = re.compile(r"<a [^>]*>([^<]*)</a>")


def cells(page: Path) -> list[tuple[str, str]]:
    """Kinds ("markdown" or "code") and texts of a page's cells, in their order.

    A notebook is read without the other pages, so links to them become their paths.
    """
    text = FRONT_MATTER.sub("", page.read_text())
    parts = CODE.split(text)  # text and code in turn
    found = []
    for position, part in enumerate(parts):
        if position % 2:
            found.append(("code", part.rstrip("\n")))
        elif part.strip():
            linked = LINK.sub(r"\1 (docs/\2)", ANCHOR.sub(r"\1", part.strip()))
            found.append(("markdown", linked))
    return found


def notebook(page: Path) -> str:
    """Returns the JSON of a page's notebook, in Jupyter's format 4.5."""
    written: list[dict[str, Any]] = []
    for number, (kind, text) in enumerate(cells(page)):
        cell = {"id": f"cell-{number}", "cell_type": kind, "metadata": {}}
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        written.append(cell | {"source": text.splitlines(keepends=True)})
    python = {"name": "python3", "display_name": "Python 3", "language": "python"}
    document = {
        "nbformat": 4,
        "nbformat_minor": 5,
        "metadata": {"kernelspec": python, "language_info": {"name": "python"}},
        "cells": written,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
