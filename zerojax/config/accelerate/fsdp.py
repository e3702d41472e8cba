"""The FSDP section of Accelerate's YAML, and its parallelism."""

import math

from zerojax.config.accelerate.keys import FSDP, PARALLELISM, STAGES
from zerojax.config.accelerate.translation import Translation
from zerojax.config.errors import as_text
from zerojax.config.row import ZERO

_STAGE, _GROUP = f"{ZERO}.stage", f"{ZERO}.mics_shard_size"
_OPTIMIZER, _PARAM = f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device"
_CPU_CHECKPOINTING = "activation_checkpointing.cpu_checkpointing"

_STRATEGIES = (f"{FSDP}.fsdp_reshard_after_forward", f"{FSDP}.fsdp_sharding_strategy")
_REPLICATE = f"{PARALLELISM}.parallelism_config_dp_replicate_size"
_SHARD = f"{PARALLELISM}.parallelism_config_dp_shard_size"


def fsdp(into: Translation) -> None:
    """Translates the section: sharding strategy, replica groups and offload.

    Args:
      into: The translation, which is updated.
    """
    given = {key: STAGES[into.values[key]] for key in _STRATEGIES if key in into.values}
    stage = next(iter(given.values()), 3)
    if len({*given.values()}) == 2:
        old, new = (f"{key} = {as_text(into.values[key])}" for key in reversed([*given]))
        into.problems.append(f"{old} contradicts {new}; remove one of them")
    if not given:
        into.imply(_STAGE, 3, "FSDP's, where no strategy is given: everything is sharded")
    for key in given:
        into.sets(key, {_STAGE: stage})
        if into.values[key].startswith("HYBRID"):
            _hybrid(into, key, stage)
    offload = f"{FSDP}.fsdp_offload_params"
    if into.values.get(offload):
        paths = (_OPTIMIZER, _PARAM) if stage == 3 else (_OPTIMIZER,)
        into.sets(offload, dict.fromkeys(paths, "cpu"))
    elif offload in into.values:
        into.note(offload, "false: everything stays on the accelerators", holds=False)
    remat = f"{FSDP}.fsdp_activation_checkpointing"
    if into.values.get(key := f"{remat}_offload") and not into.values.get(remat):
        into.problems.append(f"{key}: needs {remat}; set that to true, or this to false")
    elif key in into.values:
        into.sets(key, {_CPU_CHECKPOINTING: into.values[key]})


def _hybrid(into: Translation, key: str, stage: int) -> None:
    """Sets a shard group for each machine, as FSDP does, unless dp_replicate_size sets groups."""
    size, machines = into.values.get("num_processes", -1), into.values.get("num_machines", 1)
    if into.values.get(_REPLICATE, 1) > 1 or machines == 1:
        one_group = ", one machine: one group" * (machines == 1)
        into.sets(key, {_STAGE: stage}, f"stage {stage}{one_group}")
    elif size < 1 or size % machines:
        into.problems.append(
            f"{key} = {as_text(into.values[key])} needs num_processes, a multiple of num_machines "
            f"{machines}, for its groups; got {size}"
        )
    else:
        group = size // machines
        reason = f"stage {stage} in groups of num_processes / num_machines = {group}"
        into.sets(key, {_GROUP: group, _STAGE: stage}, reason)


def parallelism(into: Translation, kind: str) -> None:
    """Translates the sizes of `parallelism_config`: `dp_replicate_size` groups, each of which
    shards the state over `dp_shard_size` devices.

    Args:
      into: The translation, which is updated.
      kind: The value of `distributed_type`.
    """
    sizes = {
        key: value
        for key, value in into.values.items()
        if key.startswith(f"{PARALLELISM}.") and key.endswith("_size")
    }
    if not sizes:
        return
    replicas, shards = into.values.get(_REPLICATE, 1), into.values.get(_SHARD, 1)
    first_key, total = next(iter(sizes)), math.prod(sizes.values())
    processes = into.values.get("num_processes", -1)
    if processes > 0 and total != processes:
        product = " x ".join(f"{key.partition('.')[2]} {n}" for key, n in sizes.items())
        into.problems.append(
            f"{first_key}: {product} is {total}, and num_processes is {processes}; change one of "
            "them"
        )
    for key in (_REPLICATE, _SHARD):
        if key in into.values:
            into.note(key, "the batch is spread over all devices", holds=into.values[key])
    if shards > 1 and kind not in ("FSDP", "DEEPSPEED"):
        into.refuse(_SHARD, f"distributed_type {kind} shards nothing; set that to FSDP")
    elif shards == 1 < replicas and kind == "FSDP":
        into.refuse(
            _REPLICATE, "FSDP has nothing to shard over; set dp_shard_size, or MULTI_GPU as type"
        )
    elif shards > 1 and replicas > 1:
        if kind == "DEEPSPEED":
            into.refuse(_SHARD, f"DeepSpeed's groups are {_GROUP} of its JSON; write it there")
        else:
            into.sets(_SHARD, {_GROUP: shards})
