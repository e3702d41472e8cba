"""Every key of the YAML that `accelerate config` writes: its kind, Accelerate's default, and its
treatment by zerojax.

The keys are those of Accelerate 1.15 (`accelerate.commands.config.config_args.ClusterConfig` and
the options of `accelerate launch`), and the old keys that Accelerate still accepts.
"""

from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zerojax.config.keys import KEYS as JSON_KEYS
from zerojax.config.keys.row import (
    ANYTHING,
    FLAG,
    FLAG_OFF,
    NON_NEGATIVE,
    POSITIVE,
    STAGE,
    TEXT,
    TEXT_OR_NULL,
    ZERO,
    Key,
    ValueKind,
    choice,
    honoured,
    left_to_launch,
    left_to_xla,
    no_effect,
    off_only,
    optional,
)

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


def _before(kind: ValueKind, change: Callable[[object], object], says: str = "") -> ValueKind:
    return ValueKind(says or kind.says, Annotated[kind.annotation, BeforeValidator(change)])


def _or_auto(path: str) -> ValueKind:
    """Returns the kind of a JSON key that also accepts numbers in quotes and "auto"."""
    kind = _before(JSON_KEYS[path].kind, _number)
    return ValueKind(f'{kind.says} or "auto"', kind.annotation | choice("auto").annotation)


_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""FSDP's sharding strategies, in the order of their numbers, which start at 1."""


def _strategy(value: object) -> object:
    """Converts a strategy's name or number, or `true` and `false` (reshard after forward)."""
    words = {"true": True, "false": False}
    value = words.get(value.lower(), value) if isinstance(value, str) else value
    if isinstance(value, bool):
        return _STRATEGIES[0 if value else 1]
    if isinstance(number := _number(value), int) and 1 <= number <= len(_STRATEGIES):
        return _STRATEGIES[number - 1]
    return value.upper().removeprefix("_") if isinstance(value, str) else value


_NON_NEGATIVE, _POSITIVE = _before(NON_NEGATIVE, _number), _before(POSITIVE, _number)
_DEVICE = _before(choice("none", "cpu", "nvme"), _no)
_PATH = _before(optional(TEXT), _none)
_STRATEGY = _before(choice(*_STRATEGIES), _strategy)
_RESHARD = ValueKind(f"true, false or {_STRATEGY.says}", _STRATEGY.annotation)
_PROCESSES = _before(
    ValueKind("a number of processes (-1: not said)", Annotated[int, Field(strict=True, ge=-1)]),
    _number,
)
_SIZE = (_POSITIVE, 1)
_XLA = "every step is one compiled program, whose collectives the compiler schedules"
_WRAP = "nothing is wrapped: each parameter is gathered where it is used, and dropped"
_INIT = "zero.init creates every array sharded from the start"
_LAUNCH = "`zerojax launch --config-file` takes it"
_AXIS = 'give zero() a mesh with a "model" axis and the parameters a PartitionSpec on it'

_TOP: tuple[Key, ...] = (
    honoured("compute_environment", TEXT, "LOCAL_MACHINE", "processes start on machines of yours"),
    honoured("distributed_type", _before(TEXT, _upper), "NO"),
    honoured("mixed_precision", _before(choice("no", "fp16", "bf16", "fp8"), _no), "no"),
    honoured("fp16", FLAG, False, "the old name of mixed_precision: fp16"),
    *left_to_launch(
        "",
        f"{_LAUNCH}; zerojax.zero takes the devices that JAX has",
        num_processes=(_PROCESSES, -1),
        num_machines=(_POSITIVE, 1),
        gpu_ids=(ANYTHING, "all"),
        use_cpu=FLAG_OFF,
    ),
    *left_to_launch(
        "",
        _LAUNCH,
        machine_rank=(_NON_NEGATIVE, 0),
        main_process_ip=TEXT_OR_NULL,
        main_process_port=(optional(_NON_NEGATIVE), None),
    ),
    *no_effect(
        "",
        "`zerojax launch` brings the processes together itself",
        rdzv_backend="static",
        same_network=True,
        mpirun_config={},
    ),
    *no_effect("", "`zerojax launch` runs the script", main_training_function="main"),
    *no_effect("", "`zerojax launch` binds processes to CPUs by itself", enable_cpu_affinity=False),
    *no_effect("", "zerojax checks a batch's shapes by itself", debug=False),
    *no_effect("", "mixed_precision says the dtype", downcast_bf16="no"),
    *no_effect("", "it is for mixed_precision fp8", fp8_config={}),
    *no_effect("", "it is for distributed_type MEGATRON_LM", megatron_lm_config={}),
    *no_effect("", "it is for Intel's extension of PyTorch", ipex_config={}),
    *no_effect(
        "",
        "TPUs are started by `zerojax launch --kubernetes`, or by your own command on each host",
        "tpu_name tpu_zone tpu_vm tpu_env command_file commands",
        tpu_use_cluster=False,
        tpu_use_sudo=False,
    ),
    *left_to_xla("", _XLA, "dynamo_backend"),
    *left_to_xla(
        "dynamo_config",
        _XLA,
        "dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph "
        "dynamo_use_regional_compilation",
    ),
    *off_only("tp_config", _AXIS, tp_size=(_POSITIVE, 1)),
)

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

_DEEPSPEED: tuple[Key, ...] = (
    honoured(f"{DEEPSPEED}.zero_stage", _before(STAGE, _number), 2),
    honoured(f"{DEEPSPEED}.offload_optimizer_device", _DEVICE, "none"),
    honoured(f"{DEEPSPEED}.offload_optimizer_nvme_path", _PATH, None),
    honoured(f"{DEEPSPEED}.offload_param_device", _DEVICE, "none"),
    honoured(f"{DEEPSPEED}.offload_param_nvme_path", _PATH, None),
    honoured(f"{DEEPSPEED}.zero3_save_16bit_model", FLAG, False),
    *(
        honoured(f"{DEEPSPEED}.{path}", _or_auto(path), "auto")
        for path in ("gradient_accumulation_steps", "gradient_clipping")
    ),
    honoured(f"{DEEPSPEED}.deepspeed_config_file", _PATH, None),
    *no_effect(DEEPSPEED, _INIT, "zero3_init_flag"),
    *no_effect(
        DEEPSPEED,
        "experts are parameters like others, or sharded by the model's own specs",
        "deepspeed_moe_layer_cls_names",
    ),
    *left_to_launch(DEEPSPEED, _LAUNCH, deepspeed_hostfile=(_PATH, None)),
    *no_effect(
        DEEPSPEED,
        "`zerojax launch` has options --include and --exclude",
        "deepspeed_inclusion_filter deepspeed_exclusion_filter",
    ),
    *no_effect(
        DEEPSPEED,
        "`zerojax launch` starts hosts through mpirun, or is started on each of them",
        "deepspeed_multinode_launcher",
    ),
)

_FSDP: tuple[Key, ...] = (
    honoured(
        f"{FSDP}.fsdp_version",
        _before(ValueKind("1 or 2", Literal[1, 2]), _number),
        1,
        "the strategy is read in the form of either version",
    ),
    honoured(f"{FSDP}.fsdp_sharding_strategy", _STRATEGY, "FULL_SHARD"),
    honoured(f"{FSDP}.fsdp_reshard_after_forward", _RESHARD, "FULL_SHARD"),
    honoured(f"{FSDP}.fsdp_offload_params", FLAG, False),
    honoured(f"{FSDP}.fsdp_activation_checkpointing_offload", FLAG, False),
    *no_effect(
        FSDP,
        "rematerialisation is the model's: nn.remat around its blocks",
        "fsdp_activation_checkpointing",
    ),
    *no_effect(
        FSDP,
        _WRAP,
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params "
        "fsdp_use_orig_params",
    ),
    *left_to_xla(FSDP, _XLA, "fsdp_backward_prefetch fsdp_forward_prefetch"),
    *no_effect(
        FSDP,
        "checkpoints hold sharded arrays and restore on any number of devices; `python -m zerojax "
        "export` writes unsharded weights",
        "fsdp_state_dict_type",
    ),
    *no_effect(FSDP, _INIT, "fsdp_cpu_ram_efficient_loading fsdp_sync_module_states"),
    *off_only(
        FSDP,
        "give parameters that are not to be sharded a PartitionSpec of their own: "
        "zerojax.zero(..., specs=...)",
        fsdp_ignored_modules=(optional(ANYTHING), None),
    ),
)

_SEQUENCE = 'give the mesh an axis "seq": zerojax.mesh(axes={"data": ..., "seq": ...})'

_PARALLELISM: tuple[Key, ...] = (
    honoured(f"{PARALLELISM}.parallelism_config_dp_replicate_size", *_SIZE),
    honoured(f"{PARALLELISM}.parallelism_config_dp_shard_size", *_SIZE),
    *off_only(PARALLELISM, _AXIS, parallelism_config_tp_size=_SIZE),
    *off_only(
        PARALLELISM,
        _SEQUENCE,
        parallelism_config_cp_size=_SIZE,
        parallelism_config_sp_size=_SIZE,
    ),
    *no_effect(
        PARALLELISM,
        "no sequence is divided",
        "parallelism_config_cp_backend parallelism_config_cp_comm_strategy "
        "parallelism_config_sp_backend parallelism_config_sp_seq_length "
        "parallelism_config_sp_seq_length_is_variable "
        "parallelism_config_sp_attn_implementation",
    ),
)

KEYS: dict[str, Key] = {key.path: key for key in (*_TOP, *_DEEPSPEED, *_FSDP, *_PARALLELISM)}
"""Every key, by its dotted path."""

PREFIXES = {FSDP: "fsdp_", "dynamo_config": "dynamo_"}
"""The prefix that Accelerate adds to keys of a section that lack it."""

RENAMED = {f"{FSDP}.fsdp_backward_prefetch_policy": f"{FSDP}.fsdp_backward_prefetch"}
"""Current names by old names."""
