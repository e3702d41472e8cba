"""The FSDP section: stages, groups and offload, and what contradicts."""

from pathlib import Path

import pytest

import zerojax
from zerojax.config import ConfigError, load

DP = "parallelism_config: {parallelism_config_dp_replicate_size: %s, \
parallelism_config_dp_shard_size: %s}"
HYBRID = "fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}"


def yaml(folder: Path, *lines: str, kind: str = "FSDP") -> Path:
    path = folder / "default_config.yaml"
    path.write_text("\n".join([f"distributed_type: {kind}", *lines, ""]))
    return path


@pytest.mark.parametrize(
    ("given", "stage"),
    [("FULL_SHARD", 3), (1, 3), ("'2'", 2), ("no_shard", 0), ("_HYBRID_SHARD_ZERO2", 2), (4, 3)],
)
def test_the_strategy_by_name_or_number(tmp_path: Path, given: object, stage: int) -> None:
    path = yaml(tmp_path, f"fsdp_config: {{fsdp_sharding_strategy: {given}}}")
    assert load(path).stage == stage


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            ["fsdp_config: {fsdp_sharding_strategy: 1, fsdp_reshard_after_forward: false}"],
            'fsdp_config.fsdp_sharding_strategy = "FULL_SHARD" contradicts '
            'fsdp_config.fsdp_reshard_after_forward = "SHARD_GRAD_OP"',
        ),
        (["fsdp_config: {fsdp_ignored_modules: lm_head}"], "a PartitionSpec of their own"),
        ([HYBRID, "num_machines: 2"], "needs num_processes, a multiple of num_machines 2"),
        ([DP % (2, 4), "num_processes: 6"], "is 8, and num_processes is 6; change one of them"),
    ],
)
def test_what_is_wrong_has_the_words_of_the_yaml(
    tmp_path: Path, lines: list[str], says: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load(yaml(tmp_path, *lines))
    assert says in str(error.value)
    assert "zero_optimization" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [("MULTI_GPU", "set that to FSDP"), ("DEEPSPEED", "mics_shard_size of its JSON")],
)
def test_groups_are_for_fsdp(tmp_path: Path, kind: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load(yaml(tmp_path, DP % (2, 4), kind=kind))
    assert load(yaml(tmp_path, DP % (8, 1), kind=kind)).mics_shard_size == -1


def test_groups_are_replica_groups(tmp_path: Path) -> None:
    path = yaml(tmp_path, HYBRID, "num_machines: 4", "num_processes: 8")
    zero = zerojax.zero(path)
    assert dict(zero.mesh.shape) == {"replica": 4, "data": 2}
    with pytest.raises(ConfigError, match=r"^fsdp_config.fsdp_sharding_strategy = HYBRID_SHARD \("):
        zerojax.zero(path, mesh=zerojax.mesh())


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        (
            [HYBRID, "num_machines: 2", "num_processes: 6"],
            r"^fsdp_config\.fsdp_sharding_strategy = HYBRID_SHARD \(stage 3 in groups of "
            r"num_processes / num_machines = 3\) does not divide the 8 devices",
        ),
        (
            [DP % (2, 3), "num_processes: 6"],
            r"^parallelism_config\.parallelism_config_dp_shard_size = 3 does not divide the 8 dev",
        ),
    ],
)
def test_groups_that_do_not_divide_the_devices(tmp_path: Path, lines: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        zerojax.zero(yaml(tmp_path, *lines))
