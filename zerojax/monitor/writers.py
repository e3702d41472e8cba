"""The destinations of metrics: CSV files, a TensorBoard event file, a run of wandb."""

from __future__ import annotations

import contextlib
import csv
import errno
import importlib
import io
import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar

from zerojax.config import MonitorConfig, WandbConfig, ZeroConfig

_FLUSH_SECONDS = 1.0


class MetricsWriter:
    """A destination of metrics. Its errors are logged, and training continues.

    Attributes:
      where: A description of the destination, for messages.
    """

    where: str

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Writes metrics by tag, at the number of global samples seen."""

    def flush(self) -> None:
        """Writes buffered figures, so that others can read them; nothing by default."""

    def close(self) -> None:
        """Writes the remaining metrics and closes the destination; nothing by default."""


def check(config: ZeroConfig) -> None:
    """Checks that the packages of the config's monitors are installed.

    Raises:
      ImportError: A package is missing or broken; the message has the command that installs it.
    """
    for section, module, install in (
        ("tensorboard", "tensorboard.summary", "-e '.[monitor]'"),
        ("wandb", "wandb", "wandb"),
    ):
        try:
            if getattr(config, section) is not None:
                importlib.import_module(module)
        except ImportError as error:
            raise ImportError(
                f"the config's `{section}` needs the package {section}, which cannot be imported "
                f"({error}): pip install {install}, or remove `{section}` from the config"
            ) from error


def open_writers(config: ZeroConfig) -> list[MetricsWriter]:
    """Opens the writers that the config asks for.

    Raises:
      OSError: A folder cannot be created or written; the message has the key and the path.
    """
    opened: list[MetricsWriter] = []
    try:
        if (files := config.csv_monitor) is not None:
            opened.append(CsvFiles(_folder("csv_monitor", files)))
        if (board := config.tensorboard) is not None:
            opened.append(TensorBoardFile(_folder("tensorboard", board)))
        if config.wandb is not None:
            opened.append(WandbRun(config.wandb))
    except BaseException:
        for writer in opened:
            writer.close()
        raise
    return opened


def _folder(section: str, config: MonitorConfig) -> str:
    """Creates the folder of a monitor's files, checks that it is writable, and returns its path."""
    folder = os.path.join(config.output_path, config.job_name)
    try:
        os.makedirs(folder, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, ValueError) as error:  # ValueError: a null character
        number, why = getattr(error, "errno", None), getattr(error, "strerror", None) or error
        raise OSError(
            number or errno.EINVAL,
            f"{section}.output_path cannot be written ({why}); choose another folder, or "
            f"remove `{section}` from the config",
            os.path.abspath(folder) if number else folder,
        ) from None
    return folder


class CsvFiles(MetricsWriter):
    """A writer of one CSV file per tag, in the format of DeepSpeed's ``csv_monitor``.

    ``Train/Samples/lr`` is ``<folder>/Train_Samples_lr.csv``, with the header ``step,lr`` and a row
    ``samples,value`` for each event. Rows are appended to an existing file, without a second header
    (DeepSpeed writes a header at every start). :meth:`write` passes its rows to the operating
    system unbuffered.

    Raises:
      OSError: The folder cannot be created.
    """

    def __init__(self, folder: str) -> None:
        self.where: str = f"csv_monitor in {os.path.abspath(folder)}"
        self._folder = folder
        os.makedirs(folder, exist_ok=True)

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        """Appends each metric to its file.

        Raises:
          OSError: A file could not be written and is unchanged; the other files have their rows.
        """
        failure: OSError | None = None
        for tag, value in figures.items():
            path = os.path.join(self._folder, tag.replace("/", "_").replace(" ", "_") + ".csv")
            try:
                _append(path, ("step", tag.rpartition("/")[2]), (samples, value))
            except OSError as error:
                failure = failure or OSError(error.errno, error.strerror, path)
        if failure is not None:
            raise failure


def _append(path: str, header: tuple[str, str], row: tuple[int, float]) -> None:
    """Appends a row to a CSV file; a new file gets the header first."""
    with open(path, "ab", buffering=0) as file:
        start = file.tell()
        text = io.StringIO(newline="")
        csv.writer(text).writerows([row] if start else [header, row])
        data = text.getvalue().encode()
        # A full disk may accept only part of the data; half a row would corrupt the next one.
        try:
            if file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):
                file.truncate(start)
            raise


class TensorBoardFile(MetricsWriter):
    """A writer of a new TensorBoard event file in ``folder``.

    The package tensorboard writes the file, since users need the package to view the file anyway.
    tensorboardX is lighter, but its queue blocks forever once its thread fails on a full disk.

    Raises:
      OSError: The folder cannot be created.
    """

    def __init__(self, folder: str) -> None:
        from tensorboard.summary import Writer

        self.where: str = f"tensorboard in {os.path.abspath(folder)}"
        self._file = Writer(folder)
        self._flushed = time.monotonic()

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        for tag, value in figures.items():
            self._file.add_scalar(tag, value, samples)
        # A flush waits for tensorboard's thread: about a millisecond, too much for short steps.
        if time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        self._file.flush()
        self._flushed = time.monotonic()

    def close(self) -> None:
        self._file.close()


class WandbRun(MetricsWriter):
    """A writer to the user's open run of wandb, or to a new run, which :meth:`close` finishes.

    wandb has one open run in a process: a second writer finishes the run that the first one began.
    wandb's step is the number of global samples, as in DeepSpeed.
    """

    # The last run that was not the user's. The run itself cannot tell: wandb's takes no attributes,
    # and its config comes back in a run that the user resumes.
    _begun: ClassVar[Any] = None

    def __init__(self, config: WandbConfig) -> None:
        import wandb

        self.where: str = f"wandb project {config.project}"
        self._wandb = wandb
        running = getattr(wandb, "run", None)
        if running is not None and running is WandbRun._begun:
            running.finish()
            running = None
        self._run: Any = None
        if running is None:
            self._run = wandb.init(project=config.project, entity=config.team, group=config.group)
            WandbRun._begun = self._run

    def write(self, figures: Mapping[str, float], samples: int) -> None:
        run = self._wandb if self._run is None else self._run
        run.log(dict(figures), step=samples)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()
