"""Pages of the site that lie elsewhere in the repository, and the links of all pages.

Pages link to files as the repository has them, so that a link works there too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from cells import notebook
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "configs/README.md": "configs.md",
    "examples/README.md": "examples.md",
}
"""Paths in the repository, and where the site has them; records keep their names."""
RECORDS = "benchmarks/records"
LAST = {"changelog.md": 0.1, "records/": 0.3, "contributing.md": 0.5}
"""Beginnings of paths in the site, and the weight of those pages in a search."""


def site_paths() -> dict[str, str]:
    """Every file of the repository that the site has, with its path in the site."""
    docs = [path for path in (ROOT / "docs").rglob("*") if path.is_file()]
    records = [
        path for path in (ROOT / RECORDS).iterdir() if path.suffix in (".md", ".png")
    ]
    return {
        **{
            str(path.relative_to(ROOT)): str(path.relative_to(ROOT / "docs"))
            for path in docs
        },
        **{f"{RECORDS}/{path.name}": f"records/{path.name}" for path in records},
        **{path: name for path, name in ELSEWHERE.items() if (ROOT / path).exists()},
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside docs/, and the tutorial's notebook."""
    for path, name in site_paths().items():
        if name.endswith((".md", ".png")) and files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / path)))
    cells = notebook(ROOT / "docs/tutorial.md")
    files.append(File.generated(config, "tutorial.ipynb", content=cells))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links to files of the repository into links of the site.

    A link to a file that the site has not becomes plain text. Sets the weight
    that a search gives the page.
    """
    for beginning, boost in LAST.items():
        if page.file.src_uri.startswith(beginning):
            page.meta["search"] = {"boost": boost}
    paths = site_paths()
    here = next(
        (path for path, name in paths.items() if name == page.file.src_uri), None
    )
    if here is None:  # a generated page
        return markdown

    def linked(match: re.Match[str]) -> str:
        mark, text, target, anchor = match.groups()
        path = os.path.normpath(os.path.join(os.path.dirname(here), target))
        if path in paths:
            to = os.path.relpath(paths[path], os.path.dirname(page.file.src_uri))
            return f"{mark}[{text}]({to}{anchor or ''})"
        return text if (ROOT / path).exists() else match[0]

    return re.sub(
        r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)#\s]+)(#[^)]*)?\)", linked, markdown
    )
