"""What a run measured, and BLEU.

Example::

    bleu(["It rains in May."], ["It rains in May."])                    # 100.0
"""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a run measured. BLEU is sacrebleu's, from 0 to 100; batches are of one device."""

    losses: list[float]
    train_batch: int
    eval_batch: int
    memory: str
    samples_per_second: float
    seconds_an_epoch: float
    seconds_of_evaluation: float
    bleu_of_sources: float
    bleu: float


def bleu(texts: Sequence[str], references: Sequence[str]) -> float:
    """sacrebleu's BLEU of a corpus, with the letters' case.

    Raises:
      ImportError: sacrebleu is not installed.
    """
    try:
        import sacrebleu
    except ImportError:
        raise ImportError("BLEU needs an extra: pip install -e '.[examples]'") from None
    return float(sacrebleu.corpus_bleu(texts, [references]).score)


def summary(report: Report) -> str:
    """One line."""
    rate, epoch = report.samples_per_second, report.seconds_an_epoch
    speed = f"{rate:,.0f} samples/s, {epoch:.1f} s an epoch" if rate else "one step, not timed"
    return (
        f"batch {report.train_batch} / {report.eval_batch} a device | {report.memory} | "
        f"{speed} | "
        f"evaluation {report.seconds_of_evaluation:.1f} s | "
        f"BLEU [bold]{report.bleu:.1f}[/], {report.bleu_of_sources:.1f} of the sources themselves"
    )
