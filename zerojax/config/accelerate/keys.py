"""Every key of the YAML that `accelerate config` writes: its kind, Accelerate's default, and its
treatment by zerojax.

The keys are those of Accelerate 1.15 (`accelerate.commands.config.config_args.ClusterConfig` and
the options of `accelerate launch`), and the old keys that Accelerate still accepts.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zerojax.config import kinds as k
from zerojax.config.keys import KEYS as JSON_KEYS
from zerojax.config.kinds import ValueKind
from zerojax.config.row import ZERO, Key, off_only, without_effect

DEEPSPEED, FSDP, PARALLELISM = "deepspeed_config", "fsdp_config", "parallelism_config"
"""The sections that control how the state is sharded."""

PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU", "XLA", "TPU")
"""Values of `distributed_type` for plain data parallelism on devices that JAX has."""

TYPES = (*PLAIN, "DEEPSPEED", "FSDP")
"""The supported values of `distributed_type`."""


def _number(value: object) -> object:
    """Converts a string that spells a number: YAML 1.1 reads 1e-3 as a string."""
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(value) if value.lstrip("+-").isdecimal() else number


def _no(value: object) -> object:
    """Converts false to "no", since YAML 1.1 reads an unquoted no as false; lowercases strings."""
    return "no" if value is False else value.lower() if isinstance(value, str) else value


def _upper(value: object) -> object:
    return "NO" if value is False else value.upper() if isinstance(value, str) else value


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.lower() == "none" else value


def _before(kind: ValueKind, change: Callable[[object], object]) -> ValueKind:
    return ValueKind(kind.says, Annotated[kind.annotation, BeforeValidator(change)])


def _or_auto(path: str) -> ValueKind:
    """Returns the kind of a JSON key that also accepts numbers in quotes and "auto"."""
    kind = _before(JSON_KEYS[path].kind, _number)
    return ValueKind(f'{kind.says} or "auto"', kind.annotation | k.choice("auto").annotation)


STAGES = {
    "FULL_SHARD": 3,
    "SHARD_GRAD_OP": 2,
    "NO_SHARD": 0,
    "HYBRID_SHARD": 3,
    "HYBRID_SHARD_ZERO2": 2,
}
"""The ZeRO stage with the same memory at rest, by FSDP's strategy, in the order of their numbers,
which start at 1. Parameters that stay gathered from the forward to the backward pass are gathered
once a step, as at stage 2."""

_STRATEGIES = (*STAGES,)


def _strategy(value: object) -> object:
    """Converts a strategy's name or number, or `true` and `false` (reshard after forward)."""
    words = {"true": True, "false": False}
    value = words.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(value, bool):
        return _STRATEGIES[0 if value else 1]
    if isinstance(number := _number(value), int) and 1 <= number <= len(_STRATEGIES):
        return _STRATEGIES[number - 1]
    return value.upper().removeprefix("_") if isinstance(value, str) else value


_NON_NEGATIVE, _POSITIVE = _before(k.NON_NEGATIVE, _number), _before(k.POSITIVE, _number)
_PATH = _before(k.optional(k.TEXT), _none)
_STRATEGY = _before(k.choice(*_STRATEGIES), _strategy)
_RESHARD = ValueKind(f"true, false or {_STRATEGY.says}", _STRATEGY.annotation)
_PROCESSES = _before(
    ValueKind("a number of processes (-1: not said)", Annotated[int, Field(strict=True, ge=-1)]),
    _number,
)
_VERSION = _before(ValueKind("1 or 2", Literal[1, 2]), _number)
_XLA = "every step is one compiled program, whose collectives the compiler schedules"
_INIT = "zero.init creates every array sharded from the start"
_LAUNCH = "`zerojax launch --config-file` takes it"
_DEVICES = f"{_LAUNCH}; zerojax.zero takes the devices that JAX has"

BECOMES = {
    f"{DEEPSPEED}.{name}": path
    for name, path in {
        "zero_stage": f"{ZERO}.stage",
        "offload_optimizer_device": f"{ZERO}.offload_optimizer.device",
        "offload_optimizer_nvme_path": f"{ZERO}.offload_optimizer.nvme_path",
        "offload_param_device": f"{ZERO}.offload_param.device",
        "offload_param_nvme_path": f"{ZERO}.offload_param.nvme_path",
        "zero3_save_16bit_model": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
        "gradient_clipping": "gradient_clipping",
    }.items()
}
"""The JSON key for each YAML key that stands for exactly one."""

_TRANSLATED = (
    Key("compute_environment", k.TEXT, "LOCAL_MACHINE", "processes start on machines of yours"),
    Key("distributed_type", _before(k.TEXT, _upper), "NO"),
    Key("mixed_precision", _before(k.choice("no", "fp16", "bf16", "fp8"), _no), "no"),
    Key("fp16", k.FLAG, False, "the old name of mixed_precision: fp16"),
    *(Key(key, _PATH if "path" in key else _or_auto(path), None) for key, path in BECOMES.items()),
    Key(f"{DEEPSPEED}.deepspeed_config_file", _PATH, None),
    Key(f"{FSDP}.fsdp_version", _VERSION, 1, "the strategy is read in the form of either version"),
    Key(f"{FSDP}.fsdp_sharding_strategy", _STRATEGY, "FULL_SHARD"),
    Key(f"{FSDP}.fsdp_reshard_after_forward", _RESHARD, "FULL_SHARD"),
    Key(f"{FSDP}.fsdp_offload_params", k.FLAG, False),
    Key(f"{FSDP}.fsdp_activation_checkpointing_offload", k.FLAG, False),
    Key(f"{PARALLELISM}.parallelism_config_dp_replicate_size", _POSITIVE, 1),
    Key(f"{PARALLELISM}.parallelism_config_dp_shard_size", _POSITIVE, 1),
    Key("num_processes", _PROCESSES, -1, _DEVICES, "left to launch"),
    Key("num_machines", _POSITIVE, 1, _DEVICES, "left to launch"),
    Key("gpu_ids", k.ANYTHING, "all", _DEVICES, "left to launch"),
    Key("use_cpu", k.FLAG, False, _DEVICES, "left to launch"),
    Key("machine_rank", _NON_NEGATIVE, 0, _LAUNCH, "left to launch"),
    Key("main_process_ip", k.optional(k.TEXT), None, _LAUNCH, "left to launch"),
    Key("main_process_port", k.optional(_NON_NEGATIVE), None, _LAUNCH, "left to launch"),
    Key(f"{DEEPSPEED}.deepspeed_hostfile", _PATH, None, _LAUNCH, "left to launch"),
)
"""The keys that set something, with Accelerate's defaults."""

_LEFT_TO_XLA = {
    "": {"dynamo_backend": _XLA},
    "dynamo_config": {
        "dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph "
        "dynamo_use_regional_compilation": _XLA
    },
    FSDP: {"fsdp_backward_prefetch fsdp_forward_prefetch": _XLA},
}

_NO_EFFECT = {
    "": {
        "rdzv_backend same_network mpirun_config": "`zerojax launch` joins the processes",
        "main_training_function": "`zerojax launch` runs the script",
        "enable_cpu_affinity": "`zerojax launch` binds processes to CPUs by itself",
        "debug": "zerojax checks a batch's shapes by itself",
        "downcast_bf16": "mixed_precision says the dtype",
        "fp8_config": "it is for mixed_precision fp8",
        "megatron_lm_config": "it is for distributed_type MEGATRON_LM",
        "ipex_config": "it is for Intel's extension of PyTorch",
        "tpu_name tpu_zone tpu_vm tpu_env command_file commands tpu_use_cluster tpu_use_sudo": (
            "start TPUs with `zerojax launch --kubernetes`, or with your own command on each host"
        ),
    },
    DEEPSPEED: {
        "zero3_init_flag": _INIT,
        "deepspeed_moe_layer_cls_names": "experts are parameters like others",
        "deepspeed_inclusion_filter deepspeed_exclusion_filter": "use launch --include, --exclude",
        "deepspeed_multinode_launcher": "`zerojax launch` starts hosts with mpirun",
    },
    FSDP: {
        "fsdp_activation_checkpointing": "put nn.remat around the model's blocks",
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params "
        "fsdp_use_orig_params": (
            "nothing is wrapped: each parameter is gathered where it is used, and dropped"
        ),
        "fsdp_state_dict_type": "`python -m zerojax export` writes unsharded weights",
        "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states": _INIT,
    },
    PARALLELISM: {
        "parallelism_config_cp_backend parallelism_config_cp_comm_strategy "
        "parallelism_config_sp_backend parallelism_config_sp_seq_length "
        "parallelism_config_sp_seq_length_is_variable "
        "parallelism_config_sp_attn_implementation": "no sequence is divided"
    },
}

_WRITTEN = {
    "rdzv_backend": "static",
    "same_network": True,
    "main_training_function": "main",
    "downcast_bf16": "no",
}
"""The values, but false, of keys without effect that `accelerate config` writes into every file."""

_OFF: dict[str, dict[str, object]] = {
    'give zero() a mesh with a "model" axis and the parameters a PartitionSpec on it': {
        "tp_config.tp_size": 1,
        f"{PARALLELISM}.parallelism_config_tp_size": 1,
    },
    'give the mesh an axis "seq": zerojax.mesh(axes={"data": ..., "seq": ...})': {
        f"{PARALLELISM}.parallelism_config_cp_size": 1,
        f"{PARALLELISM}.parallelism_config_sp_size": 1,
    },
    "give them a PartitionSpec of their own: zerojax.zero(..., specs=...)": {
        f"{FSDP}.fsdp_ignored_modules": None
    },
}


def _rows() -> Iterator[Key]:
    yield from _TRANSLATED
    yield from without_effect("left to XLA", _LEFT_TO_XLA)
    for key in without_effect("no effect", _NO_EFFECT):
        yield replace(key, default=_WRITTEN.get(key.path, False))
    for key in off_only(_OFF):
        yield replace(key, kind=_before(key.kind, _number))


KEYS: dict[str, Key] = {key.path: key for key in _rows()}
"""Every key, by its dotted path."""

PREFIXES = {FSDP: "fsdp_", "dynamo_config": "dynamo_"}
"""The prefix that Accelerate adds to keys of a section that lack it."""

RENAMED = {f"{FSDP}.fsdp_backward_prefetch_policy": f"{FSDP}.fsdp_backward_prefetch"}
"""Current names by old names."""
