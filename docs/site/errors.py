"""The entries of errors/: every message of an exception, read from zerojax/.

A line ``<!-- errors: ROOM ... -->`` of a page becomes the entries of these rooms. A
message is followed from its ``raise`` to the helper or list of problems with its text.
"""

from __future__ import annotations

import ast
import html
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mkdocs.structure.pages import Page

PACKAGE = Path(__file__).parents[2] / "zerojax"
MARK = re.compile(r"^<!-- errors: ([\w ]+) -->$", re.M)
Function = ast.FunctionDef | ast.AsyncFunctionDef
WORDS = 3
"""A shorter text is a name that a message quotes, no message."""


@cache
def inside(node: ast.AST) -> tuple[ast.AST, ...]:
    """Returns a node and all nodes inside of it."""
    return tuple(ast.walk(node))


class Entry(NamedTuple):
    """One message of the source.

    Attributes:
      room: the folder in zerojax/, or the file beside these folders.
      file: of zerojax/.
      kind: the class of the exception.
      text: the message, as HTML, each value that it quotes named in <var>.
    """

    room: str
    file: str
    kind: str
    text: str

    @property
    def anchor(self) -> str:
        """The room and the first words, which outlive a change of the line."""
        words = re.findall(r"[a-z0-9]+", html.unescape(plain(self.text)).lower())
        return "-".join((self.room, *words[:8]))


def plain(text: str) -> str:
    """Returns a text of an entry without the values that it quotes."""
    return re.sub(r"<var>.*?</var>", "", text)


class Module:
    """The syntax of one file, and the functions and texts by name."""

    def __init__(self, file: Path) -> None:
        self.file, self.tree = file, ast.parse(file.read_text())
        self.functions: dict[str, list[Function]] = {}
        self.constants: dict[str, ast.expr] = {}
        for node in inside(self.tree):
            if isinstance(node, Function):
                self.functions.setdefault(node.name, []).append(node)
        for node in self.tree.body:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self.constants[name] = value

    def text(self, node: ast.expr) -> str:
        """Returns an expression as HTML, with the values that it quotes in <var>."""
        match node:
            case ast.Constant(value=str(text)):
                return html.escape(text, quote=False)
            case ast.JoinedStr(values=values):
                # Two values side by side are two words.
                text = "".join(map(self.text, values))
                return text.replace("</var><var>", "</var> <var>")
            case ast.FormattedValue(value=value):
                return self.text(value)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self.text(left) + self.text(right)
            case ast.IfExp(body=body, orelse=orelse):
                choices = [x for x in (self.text(body), self.text(orelse)) if x]
                return f"[{' | '.join(choices)}]"
            case ast.Name(id=name) if name in self.constants:
                return self.text(self.constants[name])
            case ast.Name(id=name) | ast.Attribute(attr=name):
                return f"<var>{html.escape(name.strip('_'))}</var>"
            case ast.Call(func=ast.Attribute(attr="join"), args=[value]):
                return self.text(value)
            case ast.Call(func=ast.Attribute(value=value, attr=name), args=[]):
                return self.text(value)
            case ast.Call(args=[value, *_]) | ast.Subscript(value=value):
                return self.text(value)
            case ast.GeneratorExp(elt=value) | ast.ListComp(elt=value):
                return self.text(value)
            case ast.Starred(value=value):
                return self.text(value)
        return "<var>...</var>"

    def messages(
        self, node: ast.AST, function: ast.AST, seen: set[object]
    ) -> Iterator[str]:
        """Yields the messages that an expression in a function can have.

        Follows names to what is assigned to them, and calls to what they return.
        """
        match node:
            case ast.Constant() | ast.JoinedStr() | ast.BinOp() | ast.IfExp():
                text = self.text(node)
                if len(plain(text).split()) >= WORDS:
                    yield text
                    return
            case ast.Name(id=name) if (name, function) not in seen:
                seen.add((name, function))
                values = [*assigned(name, function)]
                if name in self.constants:
                    values.append(self.constants[name])
                for value in values:
                    yield from self.messages(value, function, seen)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                for module, helper in called(self, name):
                    if helper not in seen:
                        seen.add(helper)
                        for value in returned(helper):
                            yield from module.messages(value, helper, seen)
        for child in ast.iter_child_nodes(node):
            yield from self.messages(child, function, seen)

    def entries(self) -> Iterator[Entry]:
        """Yields the messages of every ``raise`` of the file."""
        path = self.file.relative_to(PACKAGE)
        room = path.parts[0].removesuffix(".py").strip("_")
        for function in (f for fs in self.functions.values() for f in fs):
            for node in inside(function):
                match node:
                    case ast.Raise(exc=ast.Call(func=func) as error):
                        name = getattr(func, "attr", getattr(func, "id", ""))
                        kind = name if name[:1].isupper() else result(self, name)
                        for text in self.messages(error, function, set()):
                            yield Entry(room, f"{path}", kind, text)


def result(module: Module, name: str) -> str:
    """Returns the class of the error that a helper builds."""
    for _, function in called(module, name):
        if function.returns:
            return ast.unparse(function.returns)
    return "Error"


def assigned(name: str, function: ast.AST) -> Iterator[ast.expr]:
    """Yields the values that a function gives to a name, or adds to its list."""
    for node in inside(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=found)], value=value) if found == name:
                yield value
            case ast.AnnAssign(target=ast.Name(id=found), value=value) if found == name:
                if value is not None:
                    yield value
            case ast.AugAssign(target=ast.Name(id=found), value=value) if found == name:
                yield value
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id=found), attr="append" | "extend"),
                args=[value],
            ) if found == name:
                yield value


def returned(function: ast.AST) -> Iterator[ast.expr]:
    """Yields what a function returns and yields."""
    for node in inside(function):
        if isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) and node.value:
            yield node.value


def called(module: Module, name: str) -> list[tuple[Module, Function]]:
    """Returns the functions of a name: of the module, or of the only one with it."""
    if name in module.functions:
        return [(module, function) for function in module.functions[name]]
    having = [other for other in modules() if name in other.functions]
    return (
        [(m, f) for m in having for f in m.functions[name]] if len(having) == 1 else []
    )


@cache
def modules() -> tuple[Module, ...]:
    """Returns all files of zerojax/, read."""
    return tuple(map(Module, sorted(PACKAGE.rglob("*.py"))))


@cache
def entries() -> tuple[Entry, ...]:
    """Returns the messages of zerojax/, each once, by file."""
    found = (entry for module in modules() for entry in module.entries())
    unlike = {(e.room, e.text): e for e in found}
    # A choice begins no message but a part of one; Exit is the end of a command.
    return tuple(
        e for e in unlike.values() if e.text[0] != "[" and e.kind[-4:] != "Exit"
    )


def listed(rooms: list[str]) -> str:
    """Returns the entries of rooms as HTML."""
    by_anchor: dict[str, list[Entry]] = {}
    for entry in entries():
        if entry.room in rooms:
            by_anchor.setdefault(entry.anchor, []).append(entry)
    lines = []
    for anchor, same in by_anchor.items():
        kinds = ", ".join(dict.fromkeys(entry.kind for entry in same))
        link = f'<a class="headerlink" href="#{anchor}">&para;</a>'
        lines.append(f'<dt id="{anchor}"><code>{kinds}</code> {link}</dt>')
        lines += [f"<dd>{e.text}</dd>".replace("\n", "<br>") for e in same]
    return "\n".join(('<dl class="errors">', *lines, "</dl>"))


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Puts the entries of the rooms that a line names in the place of that line."""
    if not page.file.src_uri.startswith("errors/"):
        return markdown
    return MARK.sub(lambda match: listed(match[1].split()), markdown)
