"""Where metrics go: the writers that a config asks for."""

from __future__ import annotations

import importlib
import os

from zerojax.config import ZeroConfig
from zerojax.monitor.backlog import Writer


def check(config: ZeroConfig) -> None:
    """Makes sure that what the config's monitors need is installed.

    Raises:
      ImportError: a package is missing or broken, with the way to get it.
    """
    if config.tensorboard is not None:
        _need("tensorboard.summary", "tensorboard", "pip install 'zerojax[monitor]'")
    if config.wandb is not None:
        _need("wandb", "wandb", "pip install wandb")


def _need(module: str, section: str, install: str) -> None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"the config's `{section}` needs the package {section}, which cannot be imported "
            f"({error}). Install it with {install}, or take `{section}` out of the config."
        ) from error


def open_writers(config: ZeroConfig) -> list[Writer]:
    """The writers that the config asks for, ready to take metrics.

    Raises:
      OSError: a folder cannot be made.
    """
    opened: list[Writer] = []
    try:
        if (csv := config.csv_monitor) is not None:
            from zerojax.monitor.csv_files import CsvFiles

            opened.append(CsvFiles(os.path.join(csv.output_path, csv.job_name)))
        if (board := config.tensorboard) is not None:
            from zerojax.monitor.tensorboard_file import TensorBoardFile

            opened.append(TensorBoardFile(os.path.join(board.output_path, board.job_name)))
        if config.wandb is not None:
            from zerojax.monitor.wandb_run import WandbRun

            opened.append(WandbRun(config.wandb))
    except BaseException:
        for writer in opened:
            writer.close()
        raise
    return opened
