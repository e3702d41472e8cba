"""Published tables of batches that fit and of speeds, recomputed from compiles for absent GPUs.

    python -m benchmarks.published                       # everything, a quarter of an hour
    python -m benchmarks.published --only gpt2-xl --only encoder
    python -m benchmarks.published --record benchmarks/records   # named by its sections

Beside each published figure stands the computed one and why they differ. Nothing is tuned to
agree. Needs ``pip install -e '.[compile,examples]'`` and no GPU.
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Mapping

from benchmarks.frame import Answer, Table, argument, question, say
from benchmarks.published_attention import attention
from benchmarks.published_batches import classifier, gpt2
from benchmarks.published_scaling import maxtext, torchtitan
from benchmarks.published_tables import HEADINGS, Opener, Section, open_study
from zerojax.devices.rates import RESERVE

SECTIONS: Mapping[str, Callable[[Opener], Section]] = {
    "gpt2-xl": gpt2,
    "encoder": classifier,
    "maxtext": maxtext,
    "torchtitan": torchtitan,
    "attention": attention,
}
NOTE = (
    "Compiled by XLA:GPU for absent devices. GB are 10^9 bytes; "
    f"{RESERVE / 1e9:.1f} GB of each device's memory are left for the driver, NCCL and the "
    "allocator. A largest batch was compiled and fits; one more was compiled and does not."
)


def answer(sections: Mapping[str, Section]) -> Answer:
    parts: list[str | Table] = [NOTE]
    for each in sections.values():
        rows = [HEADINGS, *(row.cells for row in each.rows)]
        parts.append(Table(rows, title=each.title, texts=len(HEADINGS), lined=True))
        parts += [f"Published: {each.source}", f"Here: {each.ours}"]
    return Answer({name: each.figures for name, each in sections.items()}, parts)


@question(
    "published",
    "Published tables, recomputed",
    argument("--only", action="append", choices=[*SECTIONS], help="may be repeated"),
    absent_devices=True,
)
def main(options: argparse.Namespace) -> Answer:
    sections = {}
    for name in options.only or SECTIONS:
        say(f"compiling {name}")
        sections[name] = SECTIONS[name](functools.partial(open_study, note=say))
    return dataclasses.replace(answer(sections), name="-".join(options.only or ["published"]))


if __name__ == "__main__":
    main()
