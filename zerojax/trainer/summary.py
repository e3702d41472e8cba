"""Lines that report an evaluation and the end of training, and the monitors' figures of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from zerojax.trainer.arguments import TrainingArguments
from zerojax.trainer.callbacks import TrainerState
from zerojax.trainer.progress import counted, figures

_SPEED = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")


def evaluation_line(metrics: Mapping[str, float], prefix: str, state: TrainerState) -> str:
    """Returns the line of an evaluation: the updates done, the loss and metrics, the speed.

    Example:
      >>> metrics = {"eval_loss": 0.25, "eval_runtime": 2.0, "eval_samples_per_second": 400.0}
      >>> evaluation_line(metrics, "eval", TrainerState(global_step=3, max_steps=10))
      'step  3/10  eval_loss 0.25  400 rows/s'
    """
    values = {k: v for k, v in metrics.items() if not k.endswith(_SPEED) and k != "epoch"}
    speed = f"{metrics[f'{prefix}_samples_per_second']:,.0f} rows/s"
    return f"{counted(state.global_step, state.max_steps)}  {figures(values)}  {speed}"


def monitored(
    metrics: Mapping[str, object], group: str, without: tuple[str, ...] = ("epoch",)
) -> dict[str, float]:
    """Returns the numbers among metrics by tag, for the config's monitors.

    Example:
      >>> monitored({"eval_loss": 0.25, "eval_report": "...", "epoch": 1.0}, "Eval")
      {'Eval/Samples/eval_loss': 0.25}
    """
    numbers = {k: v for k, v in metrics.items() if isinstance(v, int | float) and k not in without}
    return {f"{group}/Samples/{name}": value for name, value in numbers.items()}


def summary_lines(
    logs: Mapping[str, float],
    speed: str,
    checkpoint: str | None,
    state: TrainerState,
    args: TrainingArguments,
) -> Iterator[str]:
    """Yields the lines at the end of a call of ``train``.

    Args:
      logs: The figures of the call, as in the last entry of ``log_history``.
      speed: Tokens or rows per second without compilation and evaluations; empty if unknown.
      checkpoint: The path of the newest checkpoint, or of the best if it was loaded.
      state: The progress.
      args: The arguments of the run.
    """
    yield (
        f"trained to step {state.global_step}/{state.max_steps}, epoch {state.epoch:.3g}, in "
        f"{duration(logs['train_runtime'])}{speed and f', {speed}'}, mean loss "
        f"{logs['train_loss']:.4g}"
    )
    if state.best_metric is not None:
        best = {args.metric_for_best_model: state.best_metric}
        yield f"best {figures(best)}, at step {state.best_global_step}"
    if checkpoint is not None:
        loaded = " (the best, loaded)" if args.load_best_model_at_end else ""
        yield f"checkpoint {checkpoint}{loaded}"


def duration(seconds: float) -> str:
    """Returns a time in words.

    Example:
      >>> duration(7.25), duration(61), duration(7322)
      ('7.2 s', '1 min 1 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
