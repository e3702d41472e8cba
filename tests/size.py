"""The size of the house: what is counted, and the budgets that hold it.

``python -m tests.size`` prints each count beside its budget, and ``--lower`` writes the budgets of
what has shrunk. ``tests/test_size.py`` fails where they disagree.
"""

import argparse
import ast
import functools
import io
import json
import re
import tokenize
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
BUDGETS = ROOT / "tests/budgets.toml"
SLACK = 0.05
"""By how much a count may be below its budget before the budget has to go down."""

LONG, MANY_PARAMETERS, MANY_FIELDS = 60, 7, 8
"""Code lines of a function, parameters of a function and fields of a class: more are counted."""

REPRESENTATION = ("graph", "xla")
"""Rooms that loop over equations for the others."""

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER}  # fmt: skip
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (ast.Module, ast.ClassDef, *_FUNCTIONS)
_LOOPS = (ast.For, ast.comprehension)


class Module(NamedTuple):
    """A file of Python.

    Attributes:
      path: Relative to the root of the project.
      nodes: Its syntax, every node.
      code: Numbers of the lines with code: no blank line, comment or docstring.
    """

    path: Path
    nodes: tuple[ast.AST, ...]
    code: frozenset[int]

    def lines(self, node: ast.stmt | ast.expr) -> int:
        """Counts the code lines of a node."""
        assert node.end_lineno is not None
        return len(self.code & {*range(node.lineno, node.end_lineno + 1)})


@functools.cache
def module(path: Path) -> Module:
    source = path.read_text()
    nodes = (*ast.walk(ast.parse(source)),)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {
        line
        for token in tokens
        if token.type not in _LAYOUT
        for line in range(token.start[0], token.end[0] + 1)
    }
    docstrings = {
        line
        for node in nodes
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    return Module(path.relative_to(ROOT), nodes, frozenset(code - docstrings))


def modules(folder: str) -> list[Module]:
    return [module(path) for path in sorted((ROOT / folder).rglob("*.py"))]


def rooms() -> Iterator[tuple[str, list[Module]]]:
    """Rooms of zerojax, its files outside of them, and the folders beside it, with their files."""
    for folder in sorted(path for path in (ROOT / "zerojax").iterdir() if path.is_dir()):
        if files := modules(str(folder.relative_to(ROOT))):
            yield f"zerojax/{folder.name}", files
    yield "zerojax/*.py", [module(path) for path in sorted((ROOT / "zerojax").glob("*.py"))]
    for folder in ("pallas_kernels", "benchmarks", "examples", "tests"):
        yield folder, modules(folder)


def loops_over_equations(file: Module) -> int:
    """Counts loops and comprehensions over the equations of a jaxpr, by the names of what they
    loop over."""
    loops = [node for node in file.nodes if isinstance(node, _LOOPS)]
    return sum(
        bool(re.search(r"\b(eqns|equations)\b", ast.unparse(loop.iter)))
        or ast.unparse(loop.target) == "eqn"
        for loop in loops
    )


def long_functions(file: Module) -> int:
    nodes = (node for node in file.nodes if isinstance(node, _FUNCTIONS))
    return sum(file.lines(node) > LONG for node in nodes)


def functions_of_many_parameters(file: Module) -> int:
    arguments = (node.args for node in file.nodes if isinstance(node, _FUNCTIONS))
    return sum(
        len([a for a in (*each.posonlyargs, *each.args, *each.kwonlyargs) if a.arg != "self"])
        > MANY_PARAMETERS
        for each in arguments
    )


def wide_classes(file: Module) -> int:
    classes = (node for node in file.nodes if isinstance(node, ast.ClassDef))
    return sum(
        sum(isinstance(line, ast.AnnAssign) for line in node.body) > MANY_FIELDS for node in classes
    )


def any_types(file: Module) -> int:
    return sum(isinstance(node, ast.Name) and node.id == "Any" for node in file.nodes)


OVER_ALL: dict[str, Callable[[Module], int]] = {
    "functions of more than 60 lines": long_functions,
    "functions of more than 7 parameters": functions_of_many_parameters,
    "classes of more than 8 fields": wide_classes,
    "uses of Any": any_types,
}
"""What is counted over zerojax and pallas_kernels together."""


def counts() -> dict[str, dict[str, int]]:
    """Everything that has a budget, by the tables of ``budgets.toml``."""
    by_room = dict(rooms())
    package = [
        file for name, files in by_room.items() if name.startswith("zerojax") for file in files
    ]
    core = {f"zerojax/{room}" for room in REPRESENTATION}
    outside = [file for file in package if str(file.path.parent) not in core]
    seconds = json.loads((ROOT / ".ci/durations.json").read_text())
    return {
        "lines": {name: sum(len(file.code) for file in files) for name, files in by_room.items()},
        "files": {name: len(files) for name, files in by_room.items()},
        "over_all": {
            "code lines of zerojax": sum(len(file.code) for file in package),
            "lines of tests, blank lines and docstrings included": sum(
                len((ROOT / file.path).read_text().splitlines()) for file in by_room["tests"]
            ),
            "loops over equations outside graph and xla": sum(map(loops_over_equations, outside)),
            **{
                what: sum(map(count, [*package, *by_room["pallas_kernels"]]))
                for what, count in OVER_ALL.items()
            },
            **{
                f"CPU seconds of the {tier} tier": round(sum(s for s, _ in seconds[tier].values()))
                for tier in ("fast", "slow")
            },
        },
    }  # fmt: skip


def budgets() -> dict[str, dict[str, int]]:
    return tomllib.loads(BUDGETS.read_text())


def verdict(now: int, budget: int | None) -> str:
    """Says what is wrong with a count; nothing if it is within its budget."""
    if budget is None:
        return "has no budget: add a row"
    if now > budget:
        return "above: cut, or raise the budget in a commit of its own, with the reason in its row"
    if now < budget * (1 - SLACK):
        return "below: lower the budget in the same commit (python -m tests.size --lower)"
    return ""


def lower() -> None:
    """Writes the counts that are below their budgets into the table, whose comments stay."""
    text, held = BUDGETS.read_text(), budgets()
    for table, rows in counts().items():
        head, _, rest = text.partition(f"[{table}]\n")
        body, mark, tail = rest.partition("\n[")
        for name, now in rows.items():
            if now < held[table].get(name, 0):
                body = re.sub(rf'^("?{re.escape(name)}"? = )\d+', rf"\g<1>{now}", body, flags=re.M)
        text = f"{head}[{table}]\n{body}{mark}{tail}"
    BUDGETS.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lower", action="store_true", help="lower budgets to what is counted")
    if parser.parse_args().lower:
        lower()
    held = budgets()
    for table, rows in counts().items():
        print(f"\n{table:54}{'now':>8}{'budget':>8}{'left':>8}")
        for name, now in rows.items():
            budget = held[table].get(name)
            left = "" if budget is None else budget - now
            print(f"{name:54}{now:8}{budget or '-':>8}{left:>8}  {verdict(now, budget)}".rstrip())


if __name__ == "__main__":
    main()
