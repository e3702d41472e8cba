"""Whole configs as guides to DeepSpeed print them, to be read as they stand."""

from typing import Any

_FP16 = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
_AUTO_ADAMW = {
    "type": "AdamW",
    "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"},
}
_AUTO_WARMUP = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
_AUTO_BATCH = {
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}
_CPU = {"device": "cpu", "pin_memory": True}
_HF_STAGE_3 = {
    "stage": 3,
    "overlap_comm": True,
    "contiguous_gradients": True,
    "sub_group_size": 1e9,
    "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto",
    "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}
_HF_STAGE_2 = {
    "stage": 2,
    "allgather_partitions": True,
    "allgather_bucket_size": 2e8,
    "overlap_comm": True,
    "reduce_scatter": True,
    "reduce_bucket_size": 2e8,
    "contiguous_gradients": True,
}

# Hugging Face Transformers, "DeepSpeed", ZeRO-2 and ZeRO-3, without and with their offload.
HF_ZERO_2: dict[str, Any] = {
    "fp16": {"enabled": "auto", **_FP16},
    "bf16": {"enabled": "auto"},
    "optimizer": _AUTO_ADAMW,
    "scheduler": _AUTO_WARMUP,
    "zero_optimization": _HF_STAGE_2,
    "steps_per_print": 2000,
    **_AUTO_BATCH,
}
HF_ZERO_3: dict[str, Any] = {**HF_ZERO_2, "zero_optimization": _HF_STAGE_3}
HF_ZERO_3_OFFLOAD: dict[str, Any] = {
    **HF_ZERO_3,
    "zero_optimization": {**_HF_STAGE_3, "offload_optimizer": _CPU, "offload_param": _CPU},
}
HF_ZERO_3_NVME: dict[str, Any] = {
    **HF_ZERO_3,
    "zero_optimization": {
        **_HF_STAGE_3,
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 4,
            "fast_init": False,
        },
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
    },
    "aio": {
        "block_size": 262144,
        "queue_depth": 32,
        "thread_count": 1,
        "single_submit": False,
        "overlap_events": True,
    },
}

# DeepSpeed's own: "Getting Started", and the tutorials on ZeRO and on ZeRO-Offload.
GETTING_STARTED: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015}},
    "fp16": {"enabled": True},
    "zero_optimization": True,
}
TUTORIAL_ZERO_2_FP16: dict[str, Any] = {
    "train_batch_size": 16,
    "steps_per_print": 2000,
    "optimizer": {
        "type": "Adam",
        "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001, "warmup_num_steps": 1000},
    },
    "gradient_clipping": 1.0,
    "prescale_gradients": False,
    "bf16": {"enabled": False},
    "fp16": {
        "enabled": True,
        "fp16_master_weights_and_grads": False,
        "loss_scale": 0,
        "loss_scale_window": 500,
        "hysteresis": 2,
        "min_loss_scale": 1,
        "initial_scale_power": 15,
    },
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "reduce_scatter": True,
        "allgather_bucket_size": 50_000_000,
        "reduce_bucket_size": 50_000_000,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
}
TUTORIAL_INFINITY: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "contiguous_gradients": True,
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_prefetch_bucket_size": 1e7,
        "stage3_param_persistence_threshold": 1e5,
        "reduce_bucket_size": 1e7,
        "sub_group_size": 1e9,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
    }
}
# As the tutorial on ZeRO-Offload once was, before offload had sections.
TUTORIAL_OFFLOAD: dict[str, Any] = {
    "zero_optimization": {
        "stage": 2,
        "cpu_offload": True,
        "contiguous_gradients": True,
        "overlap_comm": True,
    }
}

# Accelerate's template of stage 3: only the program knows total_num_steps.
ACCELERATE_ZERO_3: dict[str, Any] = {
    "fp16": {"enabled": True, **_FP16},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {**_AUTO_WARMUP["params"], "total_num_steps": "auto"},
    },
    "zero_optimization": {**_HF_STAGE_3, "stage3_gather_16bit_weights_on_model_save": "auto"},
    "steps_per_print": 2000,
    **_AUTO_BATCH,
}
AXOLOTL_ZERO_3: dict[str, Any] = {
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 0,
        "reduce_bucket_size": "auto",
        "prefetch_bucket_size": "auto",
        "param_persistence_threshold": "auto",
        "max_live_parameters": 0,
        "max_reuse_distance": 0,
        "gather_16bit_weights_on_model_save": True,
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto", "auto_cast": False, **_FP16, "initial_scale_power": 32},
    "compile": {"disable": False, "backend": "inductor"},
    **_AUTO_BATCH,
}

# Megatron-DeepSpeed, as large runs were set up.
MEGATRON_FP16: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "train_batch_size": 64,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1},
    "fp16": {"enabled": True, **_FP16, "loss_scale_window": 500, "initial_scale_power": 12},
    "steps_per_print": 2000,
    "wall_clock_breakdown": False,
    "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "bloom"},
    "flops_profiler": {"enabled": False, "profile_step": 10, "detailed": True},
}

LOAD = {
    "Hugging Face, ZeRO-2": HF_ZERO_2,
    "Hugging Face, ZeRO-3": HF_ZERO_3,
    "Getting Started": GETTING_STARTED,
    "tutorial, ZeRO-2 with fp16": TUTORIAL_ZERO_2_FP16,
    "axolotl, ZeRO-3": AXOLOTL_ZERO_3,
    "Megatron, fp16": MEGATRON_FP16,
}

# Each with the devices of the optimizer's state and of the parameters.
OFFLOAD = {
    "Hugging Face, ZeRO-3 with offload": (HF_ZERO_3_OFFLOAD, ("cpu", "cpu")),
    "Hugging Face, ZeRO-3 with NVMe": (HF_ZERO_3_NVME, ("nvme", "nvme")),
    "tutorial, ZeRO-Infinity": (TUTORIAL_INFINITY, ("cpu", "cpu")),
    "tutorial, ZeRO-Offload": (TUTORIAL_OFFLOAD, ("cpu", None)),
}
