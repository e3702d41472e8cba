"""Where a long word of code may break: behind a sign, never within a name."""

from __future__ import annotations

import re
from typing import Any

TAG = re.compile(r"(<[^>]*>)")
LONG = re.compile(r"\S{12,}")
SIGN = re.compile(r"(?<=[\w\])}\"'][._/(,=\[{:|])(?=[\w\"'(\[{])")
KEPT = ("pre", "script", "style")
"""Elements whose text is left as it is: lines of code scroll."""


def on_page_content(html: str, **_: Any) -> str:
    """Puts a <wbr> behind the signs of long words, outside of blocks of code."""
    inside = 0
    parts = TAG.split(html)
    for i, part in enumerate(parts):
        match = re.match(rf"<(/?)({'|'.join(KEPT)})\b", part)
        if match:
            inside += -1 if match[1] else 1
        elif not inside and not part.startswith("<"):
            parts[i] = LONG.sub(lambda word: SIGN.sub("<wbr>", word[0]), part)
    return "".join(parts)
