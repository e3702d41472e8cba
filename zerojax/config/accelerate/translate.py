"""`translate`: from Accelerate's YAML to an equivalent DeepSpeed JSON."""

from collections.abc import Mapping
from pathlib import Path

from zerojax.config.accelerate.check import check
from zerojax.config.accelerate.fsdp import fsdp, parallelism
from zerojax.config.accelerate.keys import BECOMES, DEEPSPEED, FSDP, KEYS, PLAIN, TYPES
from zerojax.config.accelerate.translation import Translation
from zerojax.config.errors import ConfigError, as_text
from zerojax.config.json_file import plain, read_json
from zerojax.config.keys import rename
from zerojax.config.row import ZERO

_FILE = f"{DEEPSPEED}.deepspeed_config_file"
_DEFAULT_STAGE = 2  # accelerate.utils.DeepSpeedPlugin
_OTHER_CHIPS = ("NPU", "MLU", "SDAA", "MUSA", "XPU", "HPU", "NEURON")
_SECTION_OF = {DEEPSPEED: "DEEPSPEED", FSDP: "FSDP"}

_SCALER = {
    "loss_scale_window": 2000,
    "hysteresis": 1,
    "min_loss_scale": 2.0**-126,
    "raise_error_at_min_scale": False,
}
"""The settings of `torch.amp.GradScaler`, which Accelerate uses without DeepSpeed: the scale starts
at 2**16, doubles after 2000 good steps, and halves at each overflow."""

_DTYPE_EFFECTS = {
    "no": "parameters keep their own dtype",
    "bf16": "bf16.enabled: the step's body sees parameters in bfloat16",
    "fp16": "fp16.enabled: the step's body sees parameters in float16, and the loss is scaled",
}


def translate(file: Mapping[str, object], folder: Path) -> Translation:
    """Translates Accelerate's YAML into a DeepSpeed JSON with the same behavior.

    Args:
      file: The contents of the YAML, in plain dicts with string keys.
      folder: The folder of the YAML, which the path `deepspeed_config_file` is relative to.

    Raises:
      ConfigError: The JSON that the YAML names cannot be read.

    Example:
      >>> yaml = {"distributed_type": "FSDP", "mixed_precision": "bf16",
      ...         "fsdp_config": {"fsdp_reshard_after_forward": False}}
      >>> translation = translate(yaml, Path())
      >>> json = translation.raw
      >>> json["zero_optimization"], json["bf16"]["enabled"], translation.problems
      ({'stage': 2}, True, [])
    """
    checked = check(file)
    into = Translation(checked.leaves, checked.values, checked.problems)
    kind = _kind(into, file)
    for key in into.values:
        _by_table(into, key, kind)
    if kind == "DEEPSPEED":
        _deepspeed(into, folder)
    elif kind == "FSDP":
        fsdp(into)
    if kind:
        parallelism(into, kind)
        _precision(into, kind)
    if kind and kind != "DEEPSPEED":
        reason = f'{kind} clips nothing by itself; auto={{"gradient_clipping": 1.0}} does'
        into.imply("gradient_clipping", 0.0, reason)
    return into


def _kind(into: Translation, file: Mapping[str, object]) -> str:
    """Returns `distributed_type` if it is supported, else adds a problem and returns ""."""
    environment = into.values.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        into.refuse("compute_environment", "start the script on the machines: LOCAL_MACHINE")
    kind: str = into.values.get("distributed_type", "")
    if kind in TYPES:
        return kind
    if kind.removeprefix("MULTI_") in _OTHER_CHIPS:
        into.refuse("distributed_type", "JAX has GPUs, TPUs and CPUs; write MULTI_GPU")
    elif kind == "MEGATRON_LM":
        into.refuse(
            "distributed_type",
            "pipelines are pipeline.stages of a DeepSpeed JSON, tensor parallelism your own "
            "PartitionSpecs, its distributed optimizer DEEPSPEED with zero_stage 1",
        )
    elif kind:
        into.problems.append(
            f"distributed_type: expected one of {', '.join(TYPES)}, got {as_text(kind)}"
        )
    elif "distributed_type" not in file:
        into.problems.append(
            f"distributed_type: missing; `accelerate config` writes it, one of {', '.join(TYPES)}; "
            "a DeepSpeed config is a .json"
        )
    return ""


def _by_table(into: Translation, key: str, kind: str) -> None:
    """Records the treatment of a key if the table determines it without other keys."""
    row, value = KEYS[key], into.values[key]
    needs = _SECTION_OF.get(key.rpartition(".")[0], kind)
    if row.treatment == "left to launch":
        into.note(key, row.why, row.treatment)
    elif kind and needs != kind:
        into.note(key, f"it is for distributed_type {needs}", "no effect")
    elif row.treatment == "off only":
        if value != row.default:
            into.refuse(key, f"{row.why}; leave it out")
        into.note(key, "off", holds=value)
    elif row.treatment != "honoured":
        into.note(key, row.why, row.treatment)
    elif row.why:
        into.note(key, row.why, holds=value)
    elif key == "distributed_type":
        why = "stage 0: the batch is spread over the devices, and nothing is sharded"
        if kind not in PLAIN:
            why = f"{kind.lower()}_config says what is sharded"
        into.note(key, why, holds=value)


def _precision(into: Translation, kind: str) -> None:
    """Translates `mixed_precision` to DeepSpeed's precision, or torch's autocast and GradScaler."""
    key = "mixed_precision"
    if "fp16" in into.values:
        if key in into.values:
            into.note("fp16", f"{key} says the dtype", "no effect")
        elif into.values["fp16"]:
            key = "fp16"
    if key not in into.values:
        return
    dtype = "fp16" if key == "fp16" else into.values[key]
    if dtype == "fp8":
        into.refuse(key, "the compute dtypes are bf16 and fp16; write bf16")
        return
    why = [_DTYPE_EFFECTS[dtype]]
    cast = dtype != "no" and (kind != "DEEPSPEED" or (dtype == "fp16" and "fp16" not in into.raw))
    # The dtype to turn off comes first: if the JSON turns it on, only this conflict is reported.
    switches = {
        f"{name}.enabled": name == dtype
        for name in (("bf16", "fp16") if dtype == "fp16" else ("fp16", "bf16"))
        if name == dtype or name in into.raw
    }
    sets: dict[str, object] = {**switches}
    if cast:
        sets["fp16.auto_cast"] = True  # autocast; DeepSpeedPlugin.set_mixed_precision
        why.append("float leaves of the batch are cast too")
    if dtype == "fp16" and kind != "DEEPSPEED":
        sets |= {f"fp16.{name}": value for name, value in _SCALER.items()}
        why.append("the scale is that of torch's GradScaler")
    if dtype == "bf16" and kind != "DEEPSPEED":
        into.imply("bf16.check_grad_overflow", False, "as torch: no update is skipped in bf16")
    into.sets(key, sets, "; ".join(why))


def _deepspeed(into: Translation, folder: Path) -> None:
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
        try:
            into.raw, problems = read_json(file)
        except ConfigError as error:
            raise ConfigError(f"{_FILE}: {file}: {each}" for each in error.problems) from None
        into.problems += problems + list(rename(into.raw))
        into.of_file = plain(into.raw)
        into.note(_FILE, f"its keys follow: {file}", holds=given)
    for key, path in BECOMES.items():
        if (value := into.values.get(key)) is not None:
            into.sets(key, {path: value})
    if into.file:
        return
    into.names = {path: key for key, path in BECOMES.items()}
    if (stage := f"{ZERO}.stage") not in into.said:
        into.imply(stage, _DEFAULT_STAGE, "Accelerate's, where zero_stage is not given")


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
