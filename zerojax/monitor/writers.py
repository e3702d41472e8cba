"""Where metrics go: the writers that a config asks for."""

from __future__ import annotations

import errno
import importlib
import os

from zerojax.config import MonitorConfig, ZeroConfig
from zerojax.monitor.backlog import MetricsWriter


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


def open_writers(config: ZeroConfig) -> list[MetricsWriter]:
    """The writers that the config asks for, ready to take metrics.

    Raises:
      OSError: a folder cannot be made, or written; the message has the key and the path.
    """
    opened: list[MetricsWriter] = []
    try:
        if (csv := config.csv_monitor) is not None:
            from zerojax.monitor.csv_files import CsvFiles

            opened.append(CsvFiles(_folder("csv_monitor", csv)))
        if (board := config.tensorboard) is not None:
            from zerojax.monitor.tensorboard_file import TensorBoardFile

            opened.append(TensorBoardFile(_folder("tensorboard", board)))
        if config.wandb is not None:
            from zerojax.monitor.wandb_run import WandbRun

            opened.append(WandbRun(config.wandb))
    except BaseException:
        for writer in opened:
            writer.close()
        raise
    return opened


def _folder(section: str, config: MonitorConfig) -> str:
    """The folder of a monitor's files, made if need be."""
    folder = os.path.join(config.output_path, config.job_name)
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:  # ValueError: a null character in it
        number, why = getattr(error, "errno", None), getattr(error, "strerror", None) or error
        raise OSError(
            number or errno.EINVAL,
            f"{section}.output_path: its files cannot be written ({why}); choose another folder, "
            f"or take `{section}` out of the config",
            os.path.abspath(folder) if number else folder,
        ) from None
    return folder
