"""Keys of DeepSpeed's JSON that have no effect in zerojax, or must stay off, with the reasons."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import BeforeValidator

from zerojax.config.kinds import FLAG, ValueKind
from zerojax.config.row import ZERO, Key, off_only, without_effect

_REMAT = "activation_checkpointing"
_EXPERTS = "experts are sharded by the model's own specs"
_INPUT = "the input pipeline is the user's own"
_PINNED = {"pin_memory": "host memory is always pinned"}

_LEFT_TO_XLA = {
    "": {"graph_harvesting compile": "every step is one compiled program"},
    "bf16": {"immediate_grad_update": "the compiler adds gradients up as they are produced"},
    ZERO: {
        "contiguous_gradients reduce_scatter allgather_partitions reduce_bucket_size "
        "allgather_bucket_size round_robin_gradients use_multi_rank_bucket_allreduce "
        "stage3_prefetch_bucket_size stage3_module_granularity_threshold "
        "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "stage3_partition_stream_chunk_size memory_efficient_linear parameter_alignment": (
            "the compiler schedules, combines and overlaps the collectives"
        )
    },
    _REMAT: {
        "contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary": (
            "the compiler lays out what a block keeps once, before the run"
        )
    },
    "pipeline": {"pipe_partitioned grad_partitioned": "the compiler shards what a stage sends"},
}

_NO_EFFECT = {
    "": {
        "flops_profiler": "`python -m zerojax plan` forecasts a step, jax.profiler records one",
        "comms_logger": "train_step.collectives(state, batch) lists what a step sends",
        "memory_breakdown": "`python -m zerojax plan` prints the memory of each device, by use",
        "log_level": "it sets DeepSpeed's own logger",
        "timers": "wall_clock_breakdown times the steps",
        "vocabulary_size": "the model knows its own",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer": "any optax optimizer will do",
        "checkpoint": "orbax saves and restores, on any number of devices",
        "aio": "tensorstore schedules the disk by itself",
    },
    "fp16": {"fused_mode": "it chooses between implementations"},
    ZERO: {
        "stage3_model_persistence_threshold": "stage3_param_persistence_threshold decides",
        "elastic_checkpoint load_from_fp32_weights pipeline_loading_checkpoint": (
            "checkpoints hold sharded arrays and restore on any number of devices"
        ),
        "override_module_apply log_trace_cache_warnings enable_sanity_checks leaf_module": (
            "it steers a PyTorch runtime"
        ),
        "mics_hierarchical_params_gather": "a group's gather is one collective",
        "save_muon_momentum_buffer_in_memory": "momentum moves with the rest of the state",
        "cpu_offload_use_pin_memory": "host memory is always pinned",
    },
    f"{ZERO}.offload_optimizer": {
        **_PINNED,
        "pipeline_read pipeline_write": "reads and writes always run beside the update",
        "fast_init": "zero.init creates the state where it is stored",
        "super_offload cpuadam_cores_perc": "the update streams through the accelerator",
        "convert_grad_on_cpu": "gradients are cast where the update runs",
    },
    f"{ZERO}.offload_param": {**_PINNED, "buffer_size": "sizes come from sub_group_size"},
    _REMAT: {"profile": "jax.profiler.trace records the time of each block"},
    "pipeline": {
        "partition": "the layers of a loop are equal, and every stage has equally many",
        "seed_layers": "the model's own keys initialize a layer, alike on any number of stages",
    },
    "wandb": {"output_path job_name": "wandb distinguishes runs by group, team and project"},
    "autotuning": {
        "start_profile_step end_profile_step metric_path fast": "fit compiles, and runs nothing",
        "tuner_type tuner_early_stopping tuner_num_trials": "fit --compiles and --minutes end it",
        "results_dir exps_dir overwrite": "fit --out names the config that is written",
        "arg_mappings": "fit writes a config; a script's own arguments are its caller's",
        "model_info model_info_path": "fit traces the model",
    },
}

_OFF: dict[str, dict[str, object]] = {
    "master weights stay in fp32, sharded over the devices": {
        "bf16.bf16_master_weights_and_grads": False,
        "fp16.fp16_master_weights_and_grads": False,
    },
    "fp16 and bf16 choose the compute dtype, the model its buffers'": {
        "data_types.param_dtype": None,
        "data_types.buffer_dtype": None,
    },
    "it names an Apex optimizer": {"optimizer.legacy_fusion": False},
    "under jax.grad an unused parameter has a zero gradient and is no error": {
        f"{ZERO}.ignore_unused_parameters": True
    },
    "one implementation of stage 1 is enough": {f"{ZERO}.legacy_stage1": False},
    "ZenFlow is not supported": {f"{ZERO}.zenflow": None},
    "no error is fed back; write zero_quantized_gradients alone, which sends as many bytes": {
        f"{ZERO}.zeropp_loco_param": None
    },
    "gradients are averaged once, in the compute dtype, by the compiler's reduce-scatter": {
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "gradient_allreduce_op": "mean",
        "communication_data_type": None,
        "seq_parallel_comm_data_type": (None, "fp32"),
        "seq_parallel_communication_data_type": (None, "fp32"),
        "sparse_gradients": False,
        "disable_allgather": False,
    },
    "the step cuts the batch into micro-batches itself": {"managed_gradient_accumulation": True},
    "sparse attention belongs in the model": {"sparse_attention": None},
    "compression is not supported": {"compression_training": {}},
    "inference is not supported": {"weight_quantization": None},
    'give zero() a mesh with a "model" axis and the parameters a PartitionSpec on it': {
        "tensor_parallel.autotp_size": (0, 1),
        "tensor_parallel.tp_size": 1,
    },
    'give the mesh an axis "seq": zerojax.mesh(axes={"data": ..., "seq": ...})': {
        "sequence_parallel_size": 1
    },
    _EXPERTS: {"use_data_before_expert_parallelism": False},
    _INPUT: {"dataloader_drop_last": False},
    "a stage has one group of layers; raise gradient_accumulation_steps": {"pipeline.rounds": 1},
    "the schedule is GPipe's; rematerialise the layers, or train at stage 3 without pipeline": {
        "pipeline.schedule": "gpipe"
    },
    "rematerialise the layer of the loop with nn.remat or jax.checkpoint": {
        "pipeline.activation_checkpoint_interval": 0
    },
    'fit searches for data-parallel devices; give zerojax.zero a mesh with a "model" axis': {
        "autotuning.mp_size": 1
    },
}

_OFF_SECTIONS = {
    "elasticity": (
        "JAX has no agent that changes the number of devices in a run; write train_batch_size and "
        "train_micro_batch_size_per_gpu for the devices of this run"
    ),
    "torch_autocast": "use bf16 or fp16; what is to stay in fp32 the model says",
    "amp": 'Apex is PyTorch\'s; use {"bf16": {"enabled": true}}',
    "comet trackio": "use tensorboard, csv_monitor or wandb",
    "progressive_layer_drop": "drop layers in the model",
    "hybrid_engine": "call zerojax.generate with the state between steps",
    "eigenvalue": "it is not supported",
    "expert_parallel": _EXPERTS,
    "nebula": "orbax saves and restores, asynchronously too",
    "data_efficiency curriculum_learning": _INPUT,
}


def _switch(value: object) -> object:
    """Returns the `enabled` of a section, without which the section is off."""
    on = value.get("enabled", False) if isinstance(value, dict) else value
    return False if on == "auto" else on


_SWITCH = ValueKind(
    'an object with "enabled" true or false', Annotated[FLAG.annotation, BeforeValidator(_switch)]
)
"""A section that must be off, as its switch; its other names are not read."""


def unsupported() -> Iterator[Key]:
    """Yields all these keys."""
    yield from without_effect("left to XLA", _LEFT_TO_XLA)
    yield from without_effect("no effect", _NO_EFFECT)
    yield from off_only(_OFF)
    for names, why in _OFF_SECTIONS.items():
        for name in names.split():
            yield Key(name, _SWITCH, False, why, "off only")
