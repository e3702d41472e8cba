"""Where a run's figures go: the options `--with_tracking` and `--report_to` of the examples.

Example::

    sections = monitors(True, "wandb", pathlib.Path("runs/glue"))
    zero = zerojax.zero(dataclasses.replace(zero.config, **sections), mesh=mesh)
"""

import importlib.util
import pathlib
from typing import Any, Literal

import zerojax

ReportTo = Literal["all", "csv", "tensorboard", "wandb"]
_FILES = {"csv": "csv_monitor", "tensorboard": "tensorboard"}
_OTHERS = ("tensorboard", "wandb")


def monitors(
    with_tracking: bool, report_to: ReportTo | None, folder: pathlib.Path
) -> dict[str, Any]:
    """The fields of a config that has these monitors; {} without tracking.

    "all", the default, is CSV files, and TensorBoard and wandb where they are installed. Files go
    to `folder/logs`; wandb's project has the folder's name.

    Raises:
      ValueError: A monitor is named without `--with_tracking`.
    """
    if not with_tracking:
        if report_to:
            raise ValueError(f"--report_to {report_to} needs --with_tracking")
        return {}
    everywhere = ["csv", *filter(_installed, _OTHERS)]
    names = everywhere if report_to in (None, "all") else [report_to]
    sections: dict[str, Any] = {
        _FILES[name]: {"enabled": True, "output_path": str(folder), "job_name": "logs"}
        for name in names
        if name in _FILES
    }
    if "wandb" in names:
        sections["wandb"] = {"enabled": True, "project": folder.name}
    config = zerojax.ZeroConfig.from_keywords(**sections)
    return {name: getattr(config, name) for name in sections}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
