"""Keys of logs and metrics, and of features that zerojax leaves to others or does not support."""

from collections.abc import Iterator

from zerojax.config.keys.row import (
    FLAG,
    FLAG_OFF,
    NON_NEGATIVE,
    NUMBER,
    OBJECT,
    OFF,
    POSITIVE,
    TEXT,
    TEXT_OR_NULL,
    Key,
    ValueKind,
    choice,
    honoured,
    left_to_xla,
    no_effect,
    off_only,
    off_section,
    optional,
    setting,
)

_EMPTY: tuple[ValueKind, object] = (OBJECT, {})
_AXIS = 'give zero() a mesh with a "model" axis and the parameters a PartitionSpec on it'
_EXPERTS = "experts are sharded by the model's own specs"
_REMAT = "activation_checkpointing"
_INPUT = "the input pipeline is the user's own"


def _monitor(section: str, **keys: tuple[ValueKind, object]) -> Iterator[Key]:
    why = f"true: metrics are written to {section}"
    yield honoured(f"{section}.enabled", FLAG, False, why)
    for name, (kind, default) in keys.items():
        yield honoured(f"{section}.{name}", kind, default, f"for {section}")


REPORTS: tuple[Key, ...] = (
    setting(
        "steps_per_print",
        optional(NON_NEGATIVE),
        None,
        "a line is printed every so many updates; 0 or null prints none",
        auto=OFF,
    ),
    setting(
        "wall_clock_breakdown",
        FLAG,
        False,
        "true: the time of a step, blocked on the device, is logged with each line",
    ),
    setting("dump_state", FLAG, False, "true: zerojax.zero prints every setting in force"),
    *no_effect(
        "flops_profiler",
        "`python -m zerojax plan` forecasts the time of a step, and jax.profiler.trace records "
        "that of each module",
        "output_file",
        enabled=False,
        profile_step=1,
        module_depth=-1,
        top_modules=1,
        detailed=True,
        recompute_fwd_factor=0.0,
    ),
    *no_effect(
        "comms_logger",
        "print train_step.collectives(state, batch), which lists what a step sends",
        enabled=False,
        verbose=False,
        prof_all=True,
        debug=False,
        prof_ops=[],
    ),
    *no_effect(
        "",
        "`python -m zerojax plan` prints the memory of each device, by use, before the run",
        memory_breakdown=False,
    ),
    *no_effect("", "it sets DeepSpeed's own logger", "log_level"),
    *no_effect("timers.throughput", "wall_clock_breakdown times the steps", "enabled synchronized"),
    *_monitor("tensorboard", output_path=(TEXT, ""), job_name=(TEXT, "DeepSpeedJobName")),
    *_monitor("csv_monitor", output_path=(TEXT, ""), job_name=(TEXT, "DeepSpeedJobName")),
    *_monitor("wandb", group=TEXT_OR_NULL, team=TEXT_OR_NULL, project=(TEXT, "deepspeed")),
    *no_effect(
        "wandb", "wandb distinguishes runs by group, team and project", "output_path job_name"
    ),
    *off_section(
        "comet",
        "use tensorboard, csv_monitor or wandb",
        "samples_log_interval project workspace api_key experiment_name experiment_key online mode",
    ),
    *off_section("trackio", "use tensorboard, csv_monitor or wandb", "project"),
)

OTHERS: tuple[Key, ...] = (
    # The model.
    *left_to_xla(
        _REMAT,
        "the compiler lays out what a block keeps once, before the run",
        "contiguous_memory_optimization number_checkpoints synchronize_checkpoint_boundary",
    ),
    *no_effect(_REMAT, "jax.profiler.trace records the time of each block", "profile"),
    setting(
        f"{_REMAT}.partition_activations",
        FLAG,
        False,
        "true: what blocks keep is cut over the devices, as it is with the batch; refused on a "
        "mesh with axes of the user's own",
    ),
    setting(
        f"{_REMAT}.cpu_checkpointing",
        FLAG,
        False,
        "true: residuals of rematerialised blocks in a scan are kept in host memory",
    ),
    *off_only(
        "", "sparse attention belongs in the model", sparse_attention=(optional(OBJECT), None)
    ),
    *off_section("progressive_layer_drop", "drop layers in the model", "theta gamma"),
    *off_only("", "compression is not supported", compression_training=_EMPTY),
    *off_only("", "inference is not supported", weight_quantization=(optional(OBJECT), None)),
    *off_section("hybrid_engine", "call zerojax.generate with the state between steps"),
    *off_section(
        "eigenvalue",
        "it is not supported",
        "verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    ),
    *no_effect("", "the model knows its own", "vocabulary_size"),
    # Parallelism other than ZeRO.
    *off_only(
        "tensor_parallel", _AXIS, autotp_size=(NON_NEGATIVE, 0, 1), tp_size=(NON_NEGATIVE, 1)
    ),
    *off_only(
        "",
        'give the mesh an axis "seq": zerojax.mesh(axes={"data": ..., "seq": ...})',
        sequence_parallel_size=(NON_NEGATIVE, 1),
    ),
    honoured(
        "pipeline.stages",
        optional(POSITIVE),
        None,
        'the devices get an outermost axis "stage" of this size, and loops over layers run as '
        "pipelines over it; null or no key: the mesh decides",
        field="pipeline_stages",
        auto='the mesh decides: its axis "stage", if it has one',
    ),
    *off_only(
        "pipeline",
        "a stage has one group of layers; for a smaller bubble set gradient_accumulation_steps "
        "higher",
        rounds=(POSITIVE, 1),
    ),
    *off_only(
        "pipeline",
        "the schedule is GPipe's; where the activations of all micro-batches do not fit, let the "
        "layers rematerialise, or train at stage 3 without pipeline stages",
        schedule=(TEXT, "gpipe"),
    ),
    *no_effect(
        "pipeline", "the layers of a loop are equal, and every stage has equally many", "partition"
    ),
    *no_effect(
        "pipeline",
        "the model's own keys initialize a layer, alike on any number of stages",
        "seed_layers",
    ),
    *off_only(
        "pipeline",
        "rematerialise the layer of the loop (nn.remat, jax.checkpoint, remat=True in models of "
        "zerojax)",
        activation_checkpoint_interval=(NON_NEGATIVE, 0),
    ),
    *left_to_xla(
        "pipeline",
        "the compiler decides how axes of the model shard what a stage sends",
        "pipe_partitioned grad_partitioned",
    ),
    *off_section("expert_parallel", _EXPERTS),
    *off_only("", _EXPERTS, use_data_before_expert_parallelism=FLAG_OFF),
    # Gradients.
    *off_only(
        "",
        "gradients are averaged once, in the compute dtype, by the compiler's reduce-scatter",
        prescale_gradients=FLAG_OFF,
        gradient_predivide_factor=(NUMBER, 1.0),
        gradient_allreduce_op=(choice("mean", "sum"), "mean"),
        communication_data_type=(optional(TEXT), None),
        seq_parallel_comm_data_type=(optional(TEXT), None, "fp32"),
        seq_parallel_communication_data_type=(optional(TEXT), None, "fp32"),
        sparse_gradients=FLAG_OFF,
        disable_allgather=FLAG_OFF,
    ),
    *off_only(
        "",
        "the decorated step cuts the batch into micro-batches itself",
        managed_gradient_accumulation=(FLAG, True),
    ),
    *off_section("amp", 'Apex is PyTorch\'s; use {"bf16": {"enabled": true}}', "opt_level"),
    *no_effect(
        "",
        "any optax optimizer may be sharded",
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    ),
    # Checkpoints and disks.
    *no_effect(
        "checkpoint",
        "orbax saves and restores, on any number of devices",
        "tag_validation load_universal use_node_local_storage parallel_write writer",
    ),
    *off_section(
        "nebula",
        "orbax saves and restores, asynchronously too",
        "persistent_storage_path persistent_time_interval num_of_version_in_retention "
        "enable_nebula_load load_path",
    ),
    *no_effect(
        "aio",
        "tensorstore schedules the disk by itself",
        "block_size queue_depth thread_count intra_op_parallelism single_submit "
        "overlap_events use_gds",
    ),
    # Data.
    *off_only("", _INPUT, dataloader_drop_last=FLAG_OFF),
    *off_section("data_efficiency", _INPUT, "seed data_sampling data_routing"),
    *off_section(
        "curriculum_learning",
        _INPUT,
        "curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    ),
    # The compiler.
    *left_to_xla("", "every step is one compiled program", "graph_harvesting compile"),
)
