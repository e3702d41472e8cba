"""The lines of ``steps_per_print`` and ``wall_clock_breakdown``, and how they are logged."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from zerojax.config import ZeroConfig
from zerojax.monitor.tags import LOSS, Scalar
from zerojax.optim.telemetry import is_known


def progress(
    report: Mapping[str, Scalar], figures: Mapping[str, Scalar], momentum: object, *, fp16: bool
) -> str:
    """Returns DeepSpeed's line on the last step, extended by loss and gradient norm.

    Waits for the step.

    Args:
      report: The result of :func:`zerojax.telemetry`, whose arrays are read.
      figures: The step's figures by tag, including the loss.
      momentum: The result of :func:`momentum`; None omits the entry.
      fp16: Whether the line has the loss scale.

    Example:
      >>> report = {"step": 10, "skipped_steps": 1, "learning_rate": 0.001, "grad_norm": 2.0,
      ...           "loss_scale": 32768.0}
      >>> progress(report, {LOSS: 0.25}, (0.9, 0.999), fp16=True)
      'step=10, skipped=1, lr=[0.001], mom=[(0.9, 0.999)], loss=0.25, grad_norm=2, loss_scale=32768'
    """
    rate = float(report["learning_rate"])
    parts = [
        f"step={int(report['step'])}",
        f"skipped={int(report['skipped_steps'])}",
        f"lr=[{rate:.7g}]" if is_known(rate) else "lr=[unknown]",
    ]
    if momentum is not None:
        parts.append(f"mom=[{momentum}]")
    if LOSS in figures:
        parts.append(f"loss={float(figures[LOSS]):.6g}")
    if is_known(norm := float(report["grad_norm"])):
        parts.append(f"grad_norm={norm:.6g}")
    if fp16:
        parts.append(f"loss_scale={float(report['loss_scale']):.10g}")
    return ", ".join(parts)


def momentum(config: ZeroConfig) -> object:
    """Returns DeepSpeed's ``mom``: the optimizer's betas or momentum, or 0.0.

    Returns None if the config does not determine them: without an optimizer, or if OneCycle changes
    the momentum.
    """
    if config.optimizer is None:
        return None
    if config.scheduler is not None and config.scheduler.with_defaults().get("cycle_momentum"):
        return None
    params = config.optimizer.with_defaults()
    return params.get("betas", params.get("momentum", 0.0))


def say(line: str) -> None:
    """Logs a line that the config asked for at INFO, and ensures that the user sees the line.

    Python's logging drops INFO by default: the root logger has the level WARNING, and no handler
    (or the handler that importing orbax leaves). Therefore the line bypasses the root logger's
    level, and is written to stderr if there is no handler. The function installs and changes
    nothing, and no line appears twice. To silence the lines, set
    ``logging.getLogger("zerojax").setLevel(logging.WARNING)``, a handler's own level, or
    ``logging.disable``.
    """
    logger = logging.getLogger("zerojax")
    if logger.level > logging.INFO or logger.manager.disable >= logging.INFO:
        return
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 0, line, (), None)
    if logger.hasHandlers():
        logger.handle(record)
        return
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(asctime)s] [%(levelname)s] [%(name)s] %(message)s"))
    handler.handle(record)
