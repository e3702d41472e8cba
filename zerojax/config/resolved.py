"""A config as text, with every effective setting, as `dump_state` prints it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields, is_dataclass

from zerojax.config.batch import BATCH_SIZES
from zerojax.config.errors import as_text
from zerojax.config.frozen import ZeroConfig
from zerojax.config.settings import BY_FIELD, SECTIONS


def resolved(config: ZeroConfig, devices: int) -> str:
    """Lists every effective setting by its JSON key, then each key without effect and the reason.

    Args:
      config: The config.
      devices: The number of data-parallel devices for which to compute the batch sizes.

    Example:
      >>> text = resolved(ZeroConfig(stage=2, train_batch_size=16, hysteresis=1), 8)
      >>> [line.split() for line in text.splitlines() if "batch" in line][0]
      ['train_batch_size', '16']
      >>> text.splitlines()[-1]
      'without effect: hysteresis = 1: fp16 is off'
    """
    rows = sorted(_rows(config, devices))
    width = max(len(key) for key, _ in rows)
    idle = [
        f"without effect: {note.key} = {as_text(note.value, 40)}: {note.reason}"
        for note in config.notes
        if note.status in ("no effect", "left to XLA")
    ]
    return "\n".join([*(f"{key:{width}}  {value}" for key, value in rows), *idle])


def _rows(config: ZeroConfig, devices: int) -> Iterator[tuple[str, str]]:
    sizes = dict(zip(BATCH_SIZES, config.batch(devices), strict=True))
    for name, value in vars(config).items():
        if name == "notes":
            continue
        place = BY_FIELD.get(name) or SECTIONS.get(name)
        key = place.path if place else name
        value = sizes.get(name, value)
        is_section = is_dataclass(value) and not isinstance(value, type)
        inner = asdict(value) if is_section else value
        if not isinstance(inner, Mapping):
            yield key, as_text(inner)
            continue
        for part, each in inner.items():
            yield f"{key}.{part}", as_text(dict(each) if isinstance(each, Mapping) else each, 80)


def changed_fields(config: ZeroConfig) -> list[tuple[str, str]]:
    """Returns pairs (name, value) of the fields that differ from their default, without the stage
    and the optimizer.

    Example:
      >>> changed_fields(ZeroConfig(stage=3, bf16=True, train_batch_size=16))
      [('bf16', 'true'), ('train_batch_size', '16')]
    """
    changed: dict[str, object] = {
        each.name: getattr(config, each.name)
        for each in fields(config)
        if getattr(config, each.name) != each.default
    }
    return [
        (name, as_text(vars(value) if is_dataclass(value) else value))
        for name, value in changed.items()
        if name not in ("stage", "optimizer", "notes")
    ]
