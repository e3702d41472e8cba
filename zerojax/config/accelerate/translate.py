"""`translate`: from Accelerate's YAML to an equivalent DeepSpeed JSON, with the treatment of each
key."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from zerojax.config.accelerate import keys as table
from zerojax.config.accelerate.keys import BECOMES, DEEPSPEED, FSDP, KEYS, PARALLELISM, SECTIONS
from zerojax.config.batch import BATCH_SIZES
from zerojax.config.check import sections, unknown_key
from zerojax.config.errors import ConfigError, as_text, quote_name
from zerojax.config.files import plain, read_json, read_yaml, repeated
from zerojax.config.keys import KEYS as JSON_KEYS
from zerojax.config.keys import rename
from zerojax.config.kinds import ValueKind
from zerojax.config.row import ZERO, Note

_FILE = f"{DEEPSPEED}.deepspeed_config_file"
_OFFLOAD = f"{FSDP}.fsdp_offload_params"
_REPLICATE = f"{PARALLELISM}.parallelism_config_dp_replicate_size"
_SHARD = f"{PARALLELISM}.parallelism_config_dp_shard_size"
_STAGE, _GROUP = f"{ZERO}.stage", f"{ZERO}.mics_shard_size"
_SECTION_OF = {DEEPSPEED: "DEEPSPEED", FSDP: "FSDP"}

_SCALER = {
    "fp16.loss_scale_window": 2000,
    "fp16.hysteresis": 1,
    "fp16.min_loss_scale": 2.0**-126,
    "fp16.raise_error_at_min_scale": False,
}
"""The settings of `torch.amp.GradScaler`, which Accelerate uses without DeepSpeed: the scale starts
at 2**16, doubles after 2000 good steps, and halves at each overflow."""

_PROGRAM_KEYS = (*BATCH_SIZES, "gradient_clipping")
"""Keys for values that an Accelerate program sets in code: in its data loaders, in `Accelerator`,
and in `clip_grad_norm_`."""


class Leaf(NamedTuple):
    """One key of the file: its path as written, its current name, and its value."""

    path: str
    key: str
    value: object


@dataclass
class Translation:
    """The DeepSpeed JSON derived from a YAML.

    Attributes:
      leaves: Every key of the YAML, in its order.
      values: The YAML's valid values by current name, each converted by its `ValueKind`; null and
        empty values are omitted, as if not given.
      problems: Sentences, each of which begins with a key of the YAML or of the JSON.
      raw: The JSON, in plain dicts.
      file: The path of the JSON that the YAML names; "" for none.
      of_file: The original contents of that JSON; without one, the keys that are left open.
      judged: Notes on the valid keys, by current name; without a reason, the note of the first key
        of the JSON that the key sets supplies treatment and reason.
      implied: Reasons for Accelerate's defaults, by the JSON key that they set.
    """

    leaves: list[Leaf]
    values: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    raw: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    of_file: dict[str, Any] = field(default_factory=dict)
    judged: dict[str, Note] = field(default_factory=dict)
    implied: dict[str, str] = field(default_factory=dict)

    def sets(self, key: str, values: Mapping[str, object], reason: str = "") -> None:
        """Translates a key of the YAML into keys of the JSON.

        If the JSON's file has a value too, and one of the two is "auto", the other wins. Two values
        that differ are a problem, of which there is one for a key.

        Args:
          key: The key of the YAML.
          values: The values that it stands for, by dotted key of the JSON.
          reason: Its effect; "" for that of the first key of the JSON.
        """
        for path, value in values.items():
            section, name = _section(self.raw, path)
            existing = section.get(name)
            if existing is None or existing == "auto":
                section[name] = value
            elif value not in ("auto", existing, _converted(JSON_KEYS[path].kind, existing)):
                other = f"{path} = {as_text(existing)} in {self.file}"
                if earlier := self.said.get(path):
                    other = f"{earlier} = {as_text(self.values[earlier])}"
                self.problems.append(
                    f"{key} = {as_text(self.values[key])} contradicts {other}; remove one of them"
                )
                return
        note = KEYS[key].note(self.values[key])
        self.judged[key] = note._replace(reason=reason, sets=(*values,))

    def imply(self, path: str, value: object, reason: str) -> None:
        """Sets a key of the JSON to Accelerate's default if nothing else sets it."""
        section, name = _section(self.raw, path)
        if name not in section:
            section[name], self.implied[path] = value, reason

    def refuse(self, key: str, why: str) -> None:
        """Adds a problem for a value that zerojax does not support."""
        self.problems.append(f"{key} = {as_text(self.values[key])} is not supported: {why}")

    def leave_open(self, auto: Mapping[str, object]) -> None:
        """Sets keys that Accelerate takes from the program to "auto", if the caller passes values.

        Args:
          auto: Values in place of "auto", by dotted key of the JSON.
        """
        for path in () if self.file else _PROGRAM_KEYS:
            if path in auto and (path not in self.raw or path in self.implied):
                self.raw[path] = self.of_file[path] = "auto"
                self.implied.pop(path, None)

    @property
    def said(self) -> dict[str, str]:
        """The YAML key for each JSON key that the YAML sets, also if the JSON's file agrees."""
        return {
            path: leaf.path
            for leaf in self.leaves
            for path in (self.judged[leaf.key].sets if leaf.key in self.judged else ())
        }

    def notes(self, of_json: Iterable[Note], given: Mapping[str, object]) -> Iterator[Note]:
        """Yields the notes of a config: first those of the YAML's keys, then those of the JSON's.

        Args:
          of_json: The loader's notes on `raw`.
          given: The values in `of_file`, by dotted key.
        """
        notes, said = {note.key: note for note in of_json}, self.said
        for path, key, value in self.leaves:
            note = self.judged.get(key)
            first = notes.get(note.sets[0]) if note and note.sets else note
            if note is None or first is None:  # the key, or that of the JSON, has a problem
                continue
            if not note.reason:
                reason = f"{first.key}: {first.reason}"
                note = note._replace(status=first.status, reason=reason, holds=first.holds)
            yield note._replace(key=path, value=value)
        for path, note in notes.items():
            if path in self.implied:
                yield note._replace(status="default", reason=self.implied[path])
            elif path not in said or given.get(path) not in (None, "auto"):
                yield note
            elif path in given:
                reason = f"{said[path]} says it"
                yield note._replace(value=given[path], status="resolved", reason=reason)

    def in_words_of_yaml(self, problem: str) -> str:
        """Returns a problem of the JSON with the YAML's keys in place of the keys they set."""
        if problem.startswith("auto: "):
            return problem
        is_in_section = self.values.get("distributed_type") == "DEEPSPEED" and not self.file
        names = {path: key for key, path in BECOMES.items() if is_in_section}
        for path, key in (names | self.said).items():
            problem = re.sub(rf'(?<![\w."]){re.escape(path)}(?![\w"]|\.\w)', key, problem)
        return problem


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
    into = check(file)
    kind = into.values.get("distributed_type", "")
    if into.values.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        into.refuse("compute_environment", "start the script on the machines: LOCAL_MACHINE")
    if kind in table.REFUSED_TYPES:
        into.refuse("distributed_type", table.REFUSED_TYPES[kind])
    elif "distributed_type" not in file:
        types = ", ".join(table.TYPES)
        into.problems.append(
            f"distributed_type: missing; `accelerate config` writes it, one of {types}; "
            "a DeepSpeed config is a .json"
        )
    if kind not in table.TYPES:
        return into
    into.judged = {key: KEYS[key].note(value) for key, value in into.values.items()}
    if kind == "DEEPSPEED" and _FILE in into.values:
        _read_file(into, folder)
    for key, value in into.values.items():
        row, needs = KEYS[key], _SECTION_OF.get(key.partition(".")[0], kind)
        if needs != kind and row.treatment != "left to launch":
            reason = f"it is for distributed_type {needs}"
            into.judged[key] = Note(key, value, "no effect", reason)
        elif key in BECOMES:
            into.sets(key, {BECOMES[key]: value})
        elif row.treatment == "off only" and value != row.default:
            into.refuse(key, f"{row.why}; leave it out")
    _precision(into, kind)
    _parallelism(into, kind)
    if kind == "FSDP":
        _fsdp(into)
        into.imply(_STAGE, 3, "FSDP's, where no strategy is given: everything is sharded")
    elif kind == "DEEPSPEED" and not into.file:  # accelerate.utils.DeepSpeedPlugin
        into.imply(_STAGE, 2, "Accelerate's, where zero_stage is not given")
    if kind != "DEEPSPEED":
        reason = f'{kind} clips nothing by itself; auto={{"gradient_clipping": 1.0}} does'
        into.imply("gradient_clipping", 0.0, reason)
    return into


def _precision(into: Translation, kind: str) -> None:
    """Translates `mixed_precision` to DeepSpeed's precision, or torch's autocast and GradScaler."""
    key = "mixed_precision"
    if into.values.get("fp16") and key not in into.values:
        key = "fp16"  # its old name, with true
    if key not in into.values:
        return
    dtype = into.values[key] if key == "mixed_precision" else key
    if dtype == "fp8":
        also = 'and "fp8": {"enabled": true} in the JSON for products in fp8'
        into.refuse(key, f"the compute dtypes are bf16 and fp16; write bf16, {also}")
        return
    is_torch, has_fp16 = kind != "DEEPSPEED", "fp16" in into.raw
    # The dtype to turn off comes first: if the JSON turns it on, only this conflict is reported.
    order = sorted(("bf16", "fp16"), key=lambda name: name == dtype)
    sets = {f"{x}.enabled": x == dtype for x in order if x == dtype or x in into.raw}
    reason = f"{dtype}.enabled: the step's body sees parameters in {dtype}"
    into.sets(key, sets, "parameters keep their own dtype" if dtype == "no" else reason)
    if dtype != "no" and (is_torch or (dtype == "fp16" and not has_fp16)):
        into.imply("fp16.auto_cast", True, "Accelerate's: autocast")  # set_mixed_precision
    if dtype == "fp16" and is_torch:
        for path, value in _SCALER.items():
            into.imply(path, value, "that of torch's GradScaler")
    if dtype == "bf16" and is_torch:
        into.imply("bf16.check_grad_overflow", False, "as torch: no update is skipped in bf16")


def _parallelism(into: Translation, kind: str) -> None:
    """Translates the sizes of `parallelism_config`: `dp_replicate_size` groups, each of which
    shards the state over `dp_shard_size` devices."""
    sizes = {
        key: value
        for key, value in into.values.items()
        if key.startswith(f"{PARALLELISM}.") and key.endswith("_size")
    }
    total, processes = math.prod(sizes.values()), into.values.get("num_processes", -1)
    if sizes and processes > 0 and total != processes:
        product = " x ".join(f"{key.partition('.')[2]} {n}" for key, n in sizes.items())
        into.problems.append(
            f"{next(iter(sizes))}: {product} is {total}, and num_processes is {processes}; change "
            "one of them"
        )
    replicas, shards = sizes.get(_REPLICATE, 1), sizes.get(_SHARD, 1)
    if shards > 1 and kind in table.PLAIN:
        into.refuse(_SHARD, f"distributed_type {kind} shards nothing; set that to FSDP")
    elif replicas > 1 == shards and kind == "FSDP":
        into.refuse(
            _REPLICATE, "FSDP has nothing to shard over; set dp_shard_size, or MULTI_GPU as type"
        )
    elif shards > 1 and replicas > 1 and kind == "DEEPSPEED":
        into.refuse(_SHARD, f"DeepSpeed's groups are {_GROUP} of its JSON; write it there")
    elif shards > 1 and replicas > 1:
        into.sets(_SHARD, {_GROUP: shards})


def _fsdp(into: Translation) -> None:
    """Translates sharding strategy, replica groups and offload of FSDP."""
    stage, processes = 3, into.values.get("num_processes", -1)
    # A hybrid strategy has a group for each machine, unless dp_replicate_size sets groups.
    machines = into.values.get("num_machines", 1) if into.values.get(_REPLICATE, 1) == 1 else 1
    for key in (f"{FSDP}.fsdp_reshard_after_forward", f"{FSDP}.fsdp_sharding_strategy"):
        if (strategy := into.values.get(key)) is None:
            continue
        stage = table.STAGES[strategy]
        if machines == 1 or not strategy.startswith("HYBRID"):
            into.sets(key, {_STAGE: stage})
        elif processes < 1 or processes % machines:
            into.problems.append(
                f"{key} = {as_text(strategy)} needs num_processes, a multiple of num_machines "
                f"{machines}, for its groups; got {processes}"
            )
        else:
            group = processes // machines
            reason = f"stage {stage} in groups of num_processes / num_machines = {group}"
            into.sets(key, {_GROUP: group, _STAGE: stage}, reason)
    if into.values.get(_OFFLOAD):
        sections = ("offload_optimizer", "offload_param")[: 2 if stage == 3 else 1]
        into.sets(_OFFLOAD, {f"{ZERO}.{section}.device": "cpu" for section in sections})


def _read_file(into: Translation, folder: Path) -> None:
    """Reads the JSON that the section `deepspeed_config` names, whose "auto" values the section's
    values replace.

    Args:
      into: The translation, which is updated.
      folder: The folder of the YAML, which the path is relative to; or the current folder.

    Raises:
      ConfigError: The JSON cannot be read, or there are two.
    """
    given = Path(into.values[_FILE])
    existing = [
        place for place in (folder / given.expanduser(), given.expanduser()) if place.exists()
    ]
    if len(existing) == 2 and not existing[0].samefile(existing[1]):
        raise ConfigError(
            f"{_FILE}: {as_text(str(given))} exists beside the YAML and in {Path.cwd()}; write the "
            "full path"
        )
    if not existing:
        folders = dict.fromkeys(str(each.resolve()) for each in (folder, Path.cwd()))
        where = "" if given.is_absolute() else f" in {' or in '.join(folders)}"
        raise ConfigError(f"{_FILE}: no such file: {given}{where}; check the path")
    into.file = str(existing[0])
    try:
        into.raw, problems = read_json(into.file)
    except ConfigError as error:
        raise ConfigError(f"{_FILE}: {into.file}: {each}" for each in error.problems) from None
    into.problems += problems + list(rename(into.raw))
    into.of_file = plain(into.raw)
    into.judged[_FILE] = into.judged[_FILE]._replace(reason=f"its keys follow: {into.file}")


def read_checked(path: Path) -> tuple[dict[str, Any], list[str]]:
    """Returns values and problems of a file that `accelerate config` wrote, as a `Translation` has
    them.

    Raises:
      ConfigError: The file cannot be read, or has no keys and values.
    """
    file = read_yaml(path)
    if not isinstance(file, dict):
        wanted = "expected keys and values, as accelerate config writes them"
        raise ConfigError(f"{wanted}, got {as_text(file)}", str(path))
    checked = check(plain(file))
    return checked.values, repeated(file) + checked.problems


def check(file: Mapping[str, object]) -> Translation:
    """Checks every key of a YAML separately; nothing is translated yet.

    Args:
      file: The contents of the YAML, in plain dicts.

    Example:
      >>> checked = check({"distributed_type": False, "num_processes": "8", "num_proceses": 8})
      >>> checked.values, checked.problems
      ({'distributed_type': 'NO', 'num_processes': 8}, \
['num_proceses: unknown key; did you mean `num_processes`?'])
    """
    into = Translation([*_leaves(file)])
    unknown, names = [], sections(KEYS)
    for path, key, value in into.leaves:
        section, _, name = key.rpartition(".")
        if key not in KEYS and key not in SECTIONS:
            unknown.append(unknown_key(section, name or path, names))
        elif key in into.values:
            into.problems.append(f"{path}: means the same as `{key}`; remove one of them")
        elif key in SECTIONS and value not in (None, {}):
            into.problems.append(f"{path}: expected an object, got {as_text(value)}")
        elif value not in (None, {}, []):
            try:
                kind = KEYS[key].kind
                converted = kind.check(_converted(kind, value))
            except ConfigError as error:
                into.problems.append(f"{path}: {error}")
            else:
                into.values |= {key: converted} if converted is not None else {}
    into.problems += unknown
    return into


def _leaves(file: Mapping[str, object]) -> Iterator[Leaf]:
    for outer, value in file.items():
        if outer in SECTIONS and isinstance(value, Mapping) and value:
            prefix = table.PREFIXES.get(outer, "")
            for inner, each in value.items():
                key = f"{outer}.{inner if inner.startswith(prefix) else prefix + inner}"
                yield Leaf(f"{outer}.{quote_name(inner)}", table.RENAMED.get(key, key), each)
        else:
            key = outer if "." not in outer else ""
            yield Leaf(quote_name(outer), table.RENAMED.get(key, key), value)


def _converted(kind: ValueKind, value: object) -> object:
    """Returns a value of the kind, also from the number that a string spells, as YAML 1.1 reads
    1e-3; any other value unchanged."""
    if isinstance(value, str):
        for read in (str, int, float):
            with suppress(ValueError):
                return kind.check(read(value))
    return value


def _section(raw: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Returns the dict in `raw` that has the key of a path, and the key's last name; a new dict, of
    no effect, where the path meets no object, of which the loader says so."""
    *outer, name = path.split(".")
    for each in outer:
        if raw.get(each) is None:
            raw[each] = {}
        raw = raw[each] if isinstance(raw[each], dict) else {}
    return raw, name
