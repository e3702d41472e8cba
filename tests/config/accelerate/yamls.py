"""YAML in the form that `accelerate config` writes, and the DeepSpeed JSON that says the same."""

from textwrap import dedent
from typing import Any

_HEAD = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
num_machines: 1
num_processes: 8
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
_OFFLOAD = {"device": "cpu"}
_FP16 = {
    "enabled": True,
    "auto_cast": True,
    "loss_scale_window": 2000,
    "hysteresis": 1,
    "min_loss_scale": 2.0**-126,
    "raise_error_at_min_scale": False,
}
_BF16 = {"bf16": {"enabled": True, "check_grad_overflow": False}, "fp16": {"auto_cast": True}}

# Each with the JSON of the same meaning.
SAME: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSpeed, the article's": (
        """
        deepspeed_config:
          gradient_accumulation_steps: 1
          gradient_clipping: 1.0
          offload_optimizer_device: none
          offload_param_device: none
          zero3_init_flag: false
          zero_stage: 2
        distributed_type: DEEPSPEED
        fsdp_config: {}
        main_process_ip: null
        mixed_precision: fp16
        """,
        {
            "gradient_accumulation_steps": 1,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 2},
            "fp16": {"enabled": True, "auto_cast": True},
        },
    ),
    "DeepSpeed, NVMe": (
        """
        deepspeed_config:
          gradient_accumulation_steps: '4'
          gradient_clipping: 1e-1
          offload_optimizer_device: nvme
          offload_optimizer_nvme_path: /nvme
          offload_param_device: cpu
          offload_param_nvme_path: none
          zero3_init_flag: true
          zero3_save_16bit_model: true
          zero_stage: 3
          deepspeed_multinode_launcher: standard
          deepspeed_moe_layer_cls_names: MixtralSparseMoeBlock
        distributed_type: DEEPSPEED
        mixed_precision: bf16
        """,
        {
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 0.1,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"},
                "offload_param": _OFFLOAD,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
            "bf16": {"enabled": True},
        },
    ),
    "DeepSpeed, Accelerate's defaults": (
        "distributed_type: DEEPSPEED\nmixed_precision: no",
        {"zero_optimization": {"stage": 2}},
    ),
    "FSDP 1": (
        """
        distributed_type: FSDP
        fsdp_config:
          fsdp_activation_checkpointing: true
          fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
          fsdp_backward_prefetch: BACKWARD_PRE
          fsdp_cpu_ram_efficient_loading: true
          fsdp_forward_prefetch: false
          fsdp_offload_params: true
          fsdp_sharding_strategy: FULL_SHARD
          fsdp_state_dict_type: SHARDED_STATE_DICT
          fsdp_sync_module_states: true
          fsdp_transformer_layer_cls_to_wrap: BertLayer
          fsdp_use_orig_params: true
        mixed_precision: bf16
        """,
        {
            "gradient_clipping": 0,
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": _OFFLOAD,
                "offload_param": _OFFLOAD,
            },
            **_BF16,
        },
    ),
    "FSDP, as once written": (
        """
        distributed_type: FSDP
        fsdp_config: {sharding_strategy: 2, min_num_params: 2000, offload_params: true,
                      fsdp_backward_prefetch_policy: NO_PREFETCH}
        fp16: true
        """,
        {
            "gradient_clipping": 0,
            "zero_optimization": {"stage": 2, "offload_optimizer": _OFFLOAD},
            "fp16": _FP16,
        },
    ),
    "FSDP 2 in groups": (
        """
        distributed_type: FSDP
        fsdp_config:
          fsdp_version: 2
          fsdp_reshard_after_forward: true
          fsdp_activation_checkpointing: true
          fsdp_activation_checkpointing_offload: true
          fsdp_offload_params: false
        parallelism_config:
          parallelism_config_dp_replicate_size: 2
          parallelism_config_dp_shard_size: 4
          parallelism_config_tp_size: 1
          parallelism_config_cp_size: 1
        """,
        {
            "gradient_clipping": 0,
            "zero_optimization": {"stage": 3, "mics_shard_size": 4},
            "activation_checkpointing": {"cpu_checkpointing": True},
        },
    ),
    "FSDP, hybrid over machines": (
        """
        distributed_type: FSDP
        fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD_ZERO2}
        num_machines: 2
        num_processes: 8
        """,
        {"gradient_clipping": 0, "zero_optimization": {"stage": 2, "mics_shard_size": 4}},
    ),
    "FSDP, hybrid on one machine": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}",
        {"gradient_clipping": 0, "zero_optimization": {"stage": 3}},
    ),
    "FSDP 2, gathered once": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false}",
        {"gradient_clipping": 0, "zero_optimization": {"stage": 2}},
    ),
    "FSDP without a strategy": (
        "distributed_type: FSDP",
        {"gradient_clipping": 0, "zero_optimization": {"stage": 3}},
    ),
    "plain": (
        """
        distributed_type: MULTI_GPU
        dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default}
        gpu_ids: all
        mixed_precision: fp16
        """,
        {"gradient_clipping": 0, "fp16": _FP16},
    ),
    "one process": (
        "distributed_type: NO\nmixed_precision: no\ndynamo_backend: NO",
        {"gradient_clipping": 0},
    ),
    "TPUs": ("distributed_type: XLA\nmixed_precision: bf16", {"gradient_clipping": 0, **_BF16}),
}


def text(name: str) -> str:
    """The whole file: what the questionnaire writes for everybody, unless the text says it."""
    own = dedent(SAME[name][0]).strip()
    keys = [line.partition(":")[0] for line in own.splitlines()]
    head = [line for line in _HEAD.strip().splitlines() if line.partition(":")[0] not in keys]
    return "\n".join([*head, own, ""])
