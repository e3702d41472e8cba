"""The error index of the site has every message of the source, once."""

import ast
import html
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/errors").glob("*.md"))
PAGE = "\n".join(page.read_text() for page in PAGES)
OF_THE_SITE = SimpleNamespace(file=SimpleNamespace(src_uri="errors/config.md"))


@pytest.fixture(scope="module")
def index() -> ModuleType:
    spec = importlib.util.spec_from_file_location("error_index", ROOT / "docs/site/errors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["error_index"] = module
    spec.loader.exec_module(module)
    return module


def test_each_room_with_messages_is_in_one_topic(index: ModuleType) -> None:
    named = [room for rooms in index.MARK.findall(PAGE) for room in rooms.split()]
    assert sorted(named) == sorted({entry.room for entry in index.entries()})


def test_every_message_that_a_raise_has_is_on_the_page(index: ModuleType) -> None:
    page = index.on_page_markdown(PAGE, OF_THE_SITE)
    text = html.unescape(page.replace("<br>", "\n"))
    missing = []
    for module in index.modules():
        for node in index.inside(module.tree):
            match node:
                case ast.Raise(exc=ast.Call(args=[ast.JoinedStr(values=[*parts]), *_])):
                    words = [part.value for part in parts if isinstance(part, ast.Constant)]
                case ast.Raise(exc=ast.Call(args=[ast.Constant(value=str(word)), *_])):
                    words = [word]
                case _:
                    continue
            is_message = len("".join(words).split()) >= index.WORDS
            if is_message:
                missing += [f"{module.file}: {word}" for word in words if word not in text]
    assert missing == []


def test_every_entry_has_an_anchor_of_its_own_and_is_in_the_source(index: ModuleType) -> None:
    page = index.on_page_markdown(PAGE, OF_THE_SITE)
    anchors = re.findall(r'<dt id="([^"]+)">', page)
    assert len(anchors) == len(set(anchors)) > 500
    assert page.count("<dd>") == len(index.entries())
