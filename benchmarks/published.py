"""Published tables of what fits and how fast, recomputed from compiles for absent GPUs.

    python -m benchmarks.published                       # everything, a quarter of an hour
    python -m benchmarks.published --only gpt2-xl --only states
    python -m benchmarks.published --record benchmarks/records   # named by its sections

Beside each published figure stands the computed one and why they differ. Nothing is tuned to
agree. Needs ``pip install -e '.[compile,examples]'`` and no GPU.
"""

import argparse
import datetime
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.published_attention import attention
from benchmarks.published_batches import chatbot, classifier, gpt2
from benchmarks.published_llama import model_states, speeds
from benchmarks.published_scaling import maxtext, torchtitan
from benchmarks.published_tables import HEADINGS, Opener, Section, open_study
from benchmarks.report import console, console_table, heading, markdown_table, write_json
from zerojax.devices.rates import RESERVE

SECTIONS: Mapping[str, Callable[[Opener], Section]] = {
    "gpt2-xl": gpt2,
    "encoder": classifier,
    "encoder-decoder": chatbot,
    "llama": speeds,
    "states": model_states,
    "maxtext": maxtext,
    "torchtitan": torchtitan,
    "attention": attention,
}
NOTE = (
    "Compiled by XLA:GPU for absent devices. GB are 10^9 bytes; "
    f"{RESERVE / 1e9:.1f} GB of each device's memory are left for the driver, NCCL and the "
    "allocator. A largest batch was compiled and fits; one more was compiled and does not."
)


def run(wanted: Sequence[str], out: Console | None = None) -> list[Section]:
    """Compile the wanted sections and print their tables as they are ready."""
    out = out or console()
    tables = []
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(wanted))

        for name in wanted:

            def note(text: str, name: str = name) -> None:
                progress.update(task, description=f"{name}: {text}")

            tables.append(SECTIONS[name](functools.partial(open_study, note=note)))
            progress.advance(task)
            show(tables[-1], out)
    return tables


def show(section: Section, out: Console) -> None:
    """One section's table."""
    caption = f"{section.source} Here: {section.ours}"
    out.print(
        console_table(
            section.table,
            title=section.title,
            caption=caption,
            caption_justify="left",
            show_lines=True,
        )
    )


def markdown(sections: Sequence[Section]) -> str:
    """The record."""
    parts = [heading("Published tables, recomputed", ", no GPU"), NOTE]
    for each in sections:
        parts.append(f"## {each.title}\n\nPublished: {each.source}\n\nHere: {each.ours}")
        parts.append(markdown_table(each.table, texts=len(HEADINGS)))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description="Published tables, recomputed."
    )
    parser.add_argument("--only", action="append", choices=SECTIONS, help="may be repeated")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="also write a record here")
    options = parser.parse_args()
    # Compiling for an absent GPU works only while JAX does not look for one.
    jax.config.update("jax_platforms", "cpu")
    # Programs that are too large are part of the tables: XLA need not warn of them.
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    sections = run(options.only or list(SECTIONS))
    if options.record:
        name = "-".join(options.only or ["published"])
        stem = options.record / f"{datetime.date.today()}-{name}"
        write_json(stem.with_suffix(".json"), {each.name: each.figures for each in sections})
        stem.with_suffix(".md").write_text(markdown(sections))


if __name__ == "__main__":
    main()
