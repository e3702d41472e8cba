"""Every key that the reference on DeepSpeed's semantics names has a row in the table."""

import pytest

from zerojax.config import ConfigError, load
from zerojax.config.keys import KEYS, renamed
from zerojax.config.named_types import NAMED_TYPES, known_types

TOP = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
steps_per_print wall_clock_breakdown memory_breakdown dump_state prescale_gradients
gradient_predivide_factor communication_data_type data_types.grad_accum_dtype
sequence_parallel_size compression_training
optimizer.type optimizer.params scheduler.type scheduler.params
"""
INSIDE = {
    "fp16": """enabled auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
        consecutive_hysteresis min_loss_scale""",
    "bf16": """enabled check_grad_overflow immediate_grad_update bf16_master_weights_and_grads
        bf16_optimizer_states""",
    "bfloat16": "enabled",
    "zero_optimization": """stage contiguous_gradients reduce_scatter allgather_partitions
        reduce_bucket_size allgather_bucket_size overlap_comm round_robin_gradients sub_group_size
        stage3_prefetch_bucket_size stage3_param_persistence_threshold
        stage3_model_persistence_threshold stage3_max_live_parameters stage3_max_reuse_distance
        stage3_gather_16bit_weights_on_model_save zero_hpz_partition_size zero_quantized_weights
        zero_quantized_gradients zero_quantized_nontrainable_weights mics_shard_size
        mics_hierarchical_params_gather elastic_checkpoint ignore_unused_parameters cpu_offload
        cpu_offload_param cpu_offload_params cpu_offload_use_pin_memory""",
    "zero_optimization.offload_param": """device nvme_path buffer_count buffer_size max_in_cpu
        pin_memory""",
    "zero_optimization.offload_optimizer": """device nvme_path buffer_count pin_memory
        pipeline_read pipeline_write fast_init ratio""",
    "activation_checkpointing": """partition_activations contiguous_memory_optimization
        cpu_checkpointing number_checkpoints profile""",
    "pipeline": """stages partition seed_layers activation_checkpoint_interval pipe_partitioned
        grad_partitioned""",
    "tensorboard": "enabled output_path job_name",
    "wandb": "enabled output_path job_name",
    "csv_monitor": "enabled output_path job_name",
}
SECTIONS = """flops_profiler comms_logger checkpoint autotuning elasticity tensor_parallel aio
    data_efficiency"""
OPTIMIZERS = """Adam AdamW FusedAdam CPUAdam Lamb Lion Muon Adagrad SGD"""
SCHEDULERS = "WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest"

NAMED = TOP.split() + [
    f"{section}.{name}" for section, names in INSIDE.items() for name in names.split()
]
# What DeepSpeed does where the JSON says nothing, as the reference has it.
DEFAULTS = {
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "fp16.auto_cast": False,
    "fp16.loss_scale": 0,
    "fp16.initial_scale_power": 16,
    "fp16.loss_scale_window": 1000,
    "fp16.hysteresis": 2,
    "fp16.consecutive_hysteresis": False,
    "fp16.min_loss_scale": 1,
    "bf16.enabled": False,
    "zero_optimization.stage": 0,
    "zero_optimization.sub_group_size": 1e9,
    "zero_optimization.stage3_param_persistence_threshold": 1e5,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": False,
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.mics_shard_size": -1,
    "zero_optimization.offload_param.device": "none",
    "zero_optimization.offload_param.buffer_count": 5,
    "zero_optimization.offload_param.max_in_cpu": 1e9,
    "zero_optimization.offload_optimizer.buffer_count": 4,
    "zero_optimization.offload_optimizer.ratio": 1.0,
}


def test_every_key_has_a_row_that_says_what_becomes_of_it():
    for key in NAMED:
        assert KEYS[renamed(key)].why or key.endswith(".params"), key
    for section in SECTIONS.split():
        assert load({section: {}}) == load({}), section


def test_defaults_are_deepspeeds():
    assert {key: KEYS[key].default for key in DEFAULTS} == DEFAULTS


def test_no_memory_that_was_not_asked_for():
    """DeepSpeed keeps up to 1e9 elements gathered by default."""
    assert KEYS["zero_optimization.stage3_max_live_parameters"].default == 0
    assert KEYS["zero_optimization.stage3_max_reuse_distance"].default is None


@pytest.mark.parametrize(
    ("section", "names"), [("optimizer", OPTIMIZERS), ("scheduler", SCHEDULERS)]
)
def test_every_type_is_known(section, names):
    assert NAMED_TYPES[section].keys() >= set(names.split())
    assert set(known_types(section).split(", ")) >= set(names.split())


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"stages": 0}, "stages: expected an integer of at least 1 or null, got 0"),
        ({"activation_checkpoint_interval": 1}, "interval = 1 is not supported: remat.*nn.remat"),
    ],
)
def test_a_pipeline_that_is_refused(section, says):
    with pytest.raises(ConfigError, match=says):
        load({"pipeline": section})


@pytest.mark.parametrize("stages", ["auto", None])
def test_the_mesh_may_decide_the_stages(stages):
    assert load({"pipeline": {"stages": stages}}).pipeline_stages is None
