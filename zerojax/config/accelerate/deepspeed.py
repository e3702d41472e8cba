"""The DeepSpeed section of Accelerate's YAML, and the JSON that it may name."""

from pathlib import Path

from zerojax.config.accelerate.keys import BECOMES, DEEPSPEED
from zerojax.config.accelerate.translation import Translation
from zerojax.config.errors import ConfigError, as_text
from zerojax.config.json_file import JsonConfig, plain, read_json
from zerojax.config.keys import rename
from zerojax.config.row import ZERO

_FILE = f"{DEEPSPEED}.deepspeed_config_file"
_DEFAULT_STAGE = 2  # accelerate.utils.DeepSpeedPlugin


def deepspeed(into: Translation, folder: Path) -> None:
    """Translates the section as `accelerate.utils.DeepSpeedPlugin` interprets it.

    If the section names a JSON, the section's values replace its "auto" values, and a value that
    differs is a problem that names both.

    Args:
      into: The translation, which is updated.
      folder: The folder of the YAML, which the path of the JSON is relative to.

    Raises:
      ConfigError: The JSON cannot be read.
    """
    if given := into.values.get(_FILE):
        file = _find_file(Path(given), folder)
        into.file = str(file)
        into.raw, problems = _read(file)
        into.problems += problems + list(rename(into.raw))
        into.of_file = plain(into.raw)
        into.stands_for(_FILE, reason=f"its keys follow: {file}")
    for key, path in BECOMES.items():
        if (value := into.values.get(key)) is not None:
            into.put(key, path, value)
            into.stands_for(key, path)
    if into.file:
        return
    into.names = {path: key for key, path in BECOMES.items()}
    if (stage := f"{ZERO}.stage") not in into.said:
        into.imply(stage, _DEFAULT_STAGE, "Accelerate's, where zero_stage is not given")


def _read(path: Path) -> JsonConfig:
    try:
        return read_json(path)
    except ConfigError as error:
        problems = (f"{_FILE}: {path}: {problem}" for problem in error.problems)
        raise ConfigError(problems) from None


def _find_file(given: Path, folder: Path) -> Path:
    """Returns the file of a path that is relative to the YAML's folder or the current folder."""
    candidates = [folder / given.expanduser(), given.expanduser()]
    existing = [place for place in candidates if place.exists()]
    if len(existing) == 2 and not existing[0].samefile(existing[1]):
        raise ConfigError(
            f"{_FILE}: {as_text(str(given))} exists beside the YAML and in {Path.cwd()}; write the "
            "full path"
        )
    if not existing:
        folders = dict.fromkeys(str(each.resolve()) for each in (folder, Path.cwd()))
        where = "" if given.is_absolute() else f" in {' or in '.join(folders)}"
        raise ConfigError(f"{_FILE}: no such file: {given}{where}; check the path")
    return existing[0]
