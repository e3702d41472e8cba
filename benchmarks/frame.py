"""The frame of every benchmark: its command line, its tables, its picture and its record.

    @question("memory", "Memory of the stages", argument("--quick", action="store_true"))
    def main(options: argparse.Namespace) -> Answer:
        ...
        return Answer({"records": records}, [NOTE, Table(rows, title="stages")])

    if __name__ == "__main__":
        main()

prints the texts and tables, writes them with ``--record FOLDER`` or ``--json OUT`` beside the
figures and the circumstances of the run, and exits with status 1 if a limit is missed.
"""

import argparse
import dataclasses
import datetime
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console

from benchmarks.report import (
    Rows,
    command,
    console,
    console_table,
    heading,
    markdown_table,
    write_json,
)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of an answer.

    Attributes:
      rows: Headings, then lines.
      title: Heading of the section; "" for none.
      texts: Number of columns, from the left, that hold text; the others hold numbers.
      lined: Whether the console draws lines between the rows.
    """

    rows: Rows
    title: str = ""
    texts: int = 1
    lined: bool = False


@dataclasses.dataclass(frozen=True)
class Answer:
    """The figures of a benchmark and what is said of them.

    Attributes:
      figures: For JSON; values may be dataclasses.
      parts: Paragraphs and tables, in order.
      draw: Writes a picture to a path ending in ".png"; None if there is no picture.
      missed: One line for each limit that was missed; None if the benchmark has no limits.
      machine: Further words about the machine, for the record.
      name: Name of the record if the options determine it; "" for that of the question.
    """

    figures: Mapping[str, object]
    parts: Sequence[str | Table]
    draw: Callable[[Path], None] | None = None
    missed: Sequence[str] | None = None
    machine: str = ""
    name: str = ""

    @property
    def paragraphs(self) -> list[str | Table]:
        """The parts, followed by the limits that were missed."""
        if self.missed is None:
            return [*self.parts]
        return [*self.parts, f"Limits missed: {'; '.join(self.missed) or 'none'}."]


class Argument(NamedTuple):
    """An argument of a command, as ``argparse`` takes it."""

    names: tuple[str, ...]
    keywords: dict[str, object]


def argument(*names: str, **keywords: object) -> Argument:
    return Argument(names, keywords)


def question(
    name: str, title: str, *arguments: Argument, absent_devices: bool = False
) -> Callable[[Callable[[argparse.Namespace], Answer]], Callable[[], None]]:
    """Turns a function that answers a question into the ``main`` of its module.

    Args:
      name: Name of the record.
      title: Heading of the record.
      arguments: Arguments of the command beside ``--record`` and ``--json``.
      absent_devices: Whether the benchmark compiles for GPUs that the machine does not have.
    """

    def decorated(answer: Callable[[argparse.Namespace], Answer]) -> Callable[[], None]:
        @functools.wraps(answer)
        def main() -> None:
            parser = _parser(sys.modules[answer.__module__].__doc__ or title, arguments)
            options = parser.parse_args()
            if absent_devices:
                compile_for_absent_devices()
            found = answer(options)
            show(found)
            if options.record:
                stem = f"{datetime.date.today()}-{found.name or name}"
                write(options.record / f"{stem}.json", title, found, absent_devices)
            if options.json:
                write(options.json, title, found, absent_devices)
            if found.missed:
                raise SystemExit("\n".join(found.missed))

        return main

    return decorated


def compile_for_absent_devices() -> None:
    """Keeps JAX from looking for a GPU, and XLA from warning of programs that are too large."""
    jax.config.update("jax_platforms", "cpu")
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"


def say(text: str) -> None:
    """Reports progress on standard error."""
    Console(stderr=True).print(text, highlight=False, markup=False)


def show(answer: Answer) -> None:
    """Prints an answer."""
    out = console()
    for part in answer.paragraphs:
        if isinstance(part, Table):
            out.print(console_table(part.rows, title=part.title, show_lines=part.lined))
        else:
            out.print(part, highlight=False, markup=False)


def write(path: Path, title: str, answer: Answer, absent_devices: bool = False) -> None:
    """Writes the figures to a path ending in ".json", and page and picture beside that file."""
    write_json(path, answer.figures)
    machine = ", no GPU" * absent_devices + answer.machine
    pages = [heading(title, machine), *map(_markdown, answer.paragraphs)]
    if answer.draw is not None:
        picture = path.with_suffix(".png")
        answer.draw(picture)
        pages.append(f"![{title}]({picture.name})")
    path.with_suffix(".md").write_text("\n\n".join(pages) + "\n")


def _markdown(part: str | Table) -> str:
    if isinstance(part, str):
        return part
    return f"## {part.title}\n\n" * bool(part.title) + markdown_table(part.rows, part.texts)


def _parser(docstring: str, arguments: Sequence[Argument]) -> argparse.ArgumentParser:
    description, _, epilog = docstring.partition("\n")
    parser = argparse.ArgumentParser(
        prog=command()[0],
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for names, keywords in arguments:
        parser.add_argument(*names, **keywords)  # type: ignore[arg-type]
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="also write a dated record into this folder"
    )
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="also write the figures here, the page beside"
    )
    return parser
