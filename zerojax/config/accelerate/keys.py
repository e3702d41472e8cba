"""Every key of the YAML that `accelerate config` writes: its kind, Accelerate's default, and its
treatment by zerojax.

The keys are those of Accelerate 1.15 (`accelerate.commands.config.config_args.ClusterConfig` and
the options of `accelerate launch`), and the old keys that Accelerate still accepts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from zerojax.config import kinds as k
from zerojax.config.keys import KEYS as JSON_KEYS
from zerojax.config.kinds import ValueKind
from zerojax.config.row import ZERO, Key, Treatment, off_only, without_effect

DEEPSPEED, FSDP, PARALLELISM = "deepspeed_config", "fsdp_config", "parallelism_config"
"""The sections that control how the state is sharded."""

PLAIN = ("NO", "MULTI_GPU", "MULTI_CPU", "XLA", "TPU")
"""Values of `distributed_type` for plain data parallelism on devices that JAX has."""

TYPES = (*PLAIN, "DEEPSPEED", "FSDP")
"""The supported values of `distributed_type`."""

REFUSED_TYPES = {
    "MEGATRON_LM": (
        "pipelines are pipeline.stages of a DeepSpeed JSON, tensor parallelism your own "
        "PartitionSpecs, its distributed optimizer DEEPSPEED with zero_stage 1"
    )
} | dict.fromkeys(
    (
        "MULTI_NPU",
        "MULTI_MLU",
        "MULTI_SDAA",
        "MULTI_MUSA",
        "MULTI_XPU",
        "MULTI_HPU",
        "MULTI_NEURON",
    ),
    "JAX has GPUs, TPUs and CPUs; write MULTI_GPU",
)
"""Remedies for the other values of `distributed_type`."""


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


def _word(*names: str, **spellings: str) -> ValueKind:
    """Returns the kind of a choice in either case; `spellings` has further ones, in capitals."""
    known = {name.upper(): name for name in names} | spellings

    def spell(value: object) -> object:
        return known.get(str(value).upper().removeprefix("_"), value)

    kind = k.choice(*dict.fromkeys(known.values()))
    return ValueKind(k.choice(*names).says, Annotated[kind.annotation, BeforeValidator(spell)])


def _becoming(key: str, path: str) -> Key:
    """Returns the row of a key that stands for one of the JSON; DeepSpeed's may be "auto"."""
    kind = JSON_KEYS[path].kind
    if key.startswith(DEEPSPEED):
        kind = ValueKind(f'{kind.says} or "auto"', kind.annotation | k.choice("auto").annotation)
    return Key(key, _PATH if "path" in key else kind, None)


def _none(value: object) -> object:
    return None if isinstance(value, str) and value.lower() == "none" else value


_PATH = ValueKind("a string or null", Annotated[str | None, BeforeValidator(_none)])
# YAML 1.1 reads an unquoted no as false.
_TYPE = _word(*TYPES, FALSE="NO", **{name: name for name in REFUSED_TYPES})
_DTYPE = _word("no", "fp16", "bf16", "fp8", FALSE="no")
# True and false say whether to reshard after the forward pass.
_NUMBERS = {str(number): name for number, name in enumerate(STAGES, 1)}
_NAMED = _word(*STAGES, TRUE="FULL_SHARD", FALSE="SHARD_GRAD_OP", **_NUMBERS)
_STRATEGY = ValueKind(f"true, false or {_NAMED.says}", _NAMED.annotation)
_PROCESSES = ValueKind(
    "a number of processes (-1: not said)", Annotated[int, Field(strict=True, ge=-1)]
)
_XLA = "every step is one compiled program, whose collectives the compiler schedules"
_INIT = "zero.init creates every array sharded from the start"
_WRAP = "nothing is wrapped: each parameter is gathered where it is used, and dropped"
_LAUNCH = "`zerojax launch --config-file` takes it"
_BATCH = "the batch is spread over all devices"
_DEVICES = f"{_LAUNCH}; zerojax.zero takes the devices that JAX has"

BECOMES = {
    f"{DEEPSPEED}.zero_stage": f"{ZERO}.stage",
    f"{DEEPSPEED}.offload_optimizer_device": f"{ZERO}.offload_optimizer.device",
    f"{DEEPSPEED}.offload_optimizer_nvme_path": f"{ZERO}.offload_optimizer.nvme_path",
    f"{DEEPSPEED}.offload_param_device": f"{ZERO}.offload_param.device",
    f"{DEEPSPEED}.offload_param_nvme_path": f"{ZERO}.offload_param.nvme_path",
    f"{DEEPSPEED}.zero3_save_16bit_model": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
    f"{DEEPSPEED}.gradient_accumulation_steps": "gradient_accumulation_steps",
    f"{DEEPSPEED}.gradient_clipping": "gradient_clipping",
    f"{FSDP}.fsdp_activation_checkpointing_offload": "activation_checkpointing.cpu_checkpointing",
}
"""The JSON key for each YAML key that stands for exactly one, with the same values."""

_TRANSLATED = (
    *(_becoming(key, path) for key, path in BECOMES.items()),
    Key("compute_environment", k.TEXT, "LOCAL_MACHINE", "processes start on machines of yours"),
    Key("distributed_type", _TYPE, "NO", "deepspeed_config or fsdp_config says what is sharded"),
    Key("mixed_precision", _DTYPE, "no"),
    Key("fp16", k.FLAG, False, "an old name; mixed_precision has precedence"),
    Key(f"{DEEPSPEED}.deepspeed_config_file", _PATH, None),
    Key(f"{FSDP}.fsdp_version", ValueKind("1 or 2", Literal[1, 2]), 1, "both forms are read"),
    Key(f"{FSDP}.fsdp_sharding_strategy", _STRATEGY, "FULL_SHARD"),
    Key(f"{FSDP}.fsdp_reshard_after_forward", _STRATEGY, "FULL_SHARD"),
    Key(f"{FSDP}.fsdp_offload_params", k.FLAG, False, "true: the state is in host memory"),
    Key(f"{PARALLELISM}.parallelism_config_dp_replicate_size", k.POSITIVE, 1, _BATCH),
    Key(f"{PARALLELISM}.parallelism_config_dp_shard_size", k.POSITIVE, 1, _BATCH),
    Key("num_processes", _PROCESSES, -1, _DEVICES, "left to launch"),
    Key("num_machines", k.POSITIVE, 1, _DEVICES, "left to launch"),
    Key("gpu_ids", k.ANYTHING, "all", _DEVICES, "left to launch"),
    Key("use_cpu", k.FLAG, False, _DEVICES, "left to launch"),
    Key("machine_rank", k.NON_NEGATIVE, 0, _LAUNCH, "left to launch"),
    Key("main_process_ip", k.optional(k.TEXT), None, _LAUNCH, "left to launch"),
    Key("main_process_port", k.optional(k.NON_NEGATIVE), None, _LAUNCH, "left to launch"),
    Key(f"{DEEPSPEED}.deepspeed_hostfile", _PATH, None, _LAUNCH, "left to launch"),
)
"""The keys that set something, with Accelerate's defaults."""

_WITHOUT_EFFECT = {
    "": {
        "dynamo_backend": _XLA,
        "rdzv_backend same_network mpirun_config main_training_function enable_cpu_affinity": (
            "`zerojax launch` starts and joins the processes, and binds them to CPUs, by itself"
        ),
        "debug downcast_bf16 fp8_config megatron_lm_config ipex_config": "it steers PyTorch",
        "tpu_name tpu_zone tpu_vm tpu_env command_file commands tpu_use_cluster tpu_use_sudo": (
            "start TPUs with `zerojax launch --kubernetes`, or with your own command on each host"
        ),
    },
    "dynamo_config": {
        "dynamo_backend dynamo_mode dynamo_use_dynamic dynamo_use_fullgraph "
        "dynamo_use_regional_compilation": _XLA
    },
    DEEPSPEED: {
        "zero3_init_flag": _INIT,
        "deepspeed_moe_layer_cls_names": _WRAP,
        "deepspeed_inclusion_filter deepspeed_exclusion_filter deepspeed_multinode_launcher": (
            "`zerojax launch` starts hosts with mpirun, and takes --include and --exclude"
        ),
    },
    FSDP: {
        "fsdp_backward_prefetch fsdp_forward_prefetch": _XLA,
        "fsdp_activation_checkpointing": "put nn.remat around the model's blocks",
        "fsdp_auto_wrap_policy fsdp_transformer_layer_cls_to_wrap fsdp_min_num_params "
        "fsdp_use_orig_params": _WRAP,
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
"""The reasons for the keys that zerojax accepts at any value; those of `_XLA` are left to XLA."""

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


def _without_effect() -> Iterator[Key]:
    for key in without_effect("no effect", _WITHOUT_EFFECT):
        treatment: Treatment = "left to XLA" if key.why == _XLA else "no effect"
        yield replace(key, treatment=treatment, default=_WRITTEN.get(key.path, False))


KEYS: dict[str, Key] = {
    key.path: key for key in (*_TRANSLATED, *_without_effect(), *off_only(_OFF))
}
"""Every key, by its dotted path."""

SECTIONS = frozenset(path.partition(".")[0] for path in KEYS if "." in path)
"""The keys that contain further keys."""

PREFIXES = {FSDP: "fsdp_", "dynamo_config": "dynamo_"}
"""The prefix that Accelerate adds to keys of a section that lack it."""

RENAMED = {f"{FSDP}.fsdp_backward_prefetch_policy": f"{FSDP}.fsdp_backward_prefetch"}
"""Current names by old names."""
