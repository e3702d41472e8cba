"""What a file of ``accelerate config`` says to a launch."""

from pathlib import Path

import pytest
from launch.launched import launched

from zerojax.launch import accelerate
from zerojax.launch.accelerate import AccelerateOptions
from zerojax.launch.error import UsageError

ONE = """
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_GPU
downcast_bf16: 'no'
enable_cpu_affinity: false
gpu_ids: 0,2
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
SEVERAL = """
distributed_type: DEEPSPEED
deepspeed_config: {deepspeed_config_file: ds.json, deepspeed_hostfile: HOSTS}
main_process_ip: 10.0.0.1
main_process_port: 29501
machine_rank: 1
num_machines: 2
num_processes: 16
"""


def given(folder: Path, text: str) -> AccelerateOptions:
    path = folder / "accelerate.yaml"
    path.write_text(text)
    return accelerate.read(path)


def test_one_machine(tmp_path: Path) -> None:
    read = given(tmp_path, ONE)
    assert read[:5] == ("2", None, None, None, None)
    assert read.environ == {"CUDA_VISIBLE_DEVICES": "0,2"}


def test_several_machines(tmp_path: Path) -> None:
    read = given(tmp_path, SEVERAL.replace("HOSTS", "null"))
    assert read[:5] == ("8", 2, 1, "10.0.0.1:29501", None)


def test_a_hostfile_takes_the_place_of_ranks(tmp_path: Path) -> None:
    read = given(tmp_path, SEVERAL.replace("HOSTS", "/job/hostfile"))
    assert read[:5] == ("8", None, None, None, Path("/job/hostfile"))


@pytest.mark.parametrize("text", ["distributed_type: 'NO'", "distributed_type: NO\nuse_cpu: true"])
def test_one_process(tmp_path: Path, text: str) -> None:
    read = given(tmp_path, text)
    assert (read.nproc_per_node, read.num_nodes) == ("1", None)
    assert read.environ == ({"JAX_PLATFORMS": "cpu"} if "cpu" in text else {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("distributed_type: XLA", "distributed_type XLA is none of NO, MULTI_GPU"),
        ("compute_environment: AMAZON_SAGEMAKER", "AMAZON_SAGEMAKER is not supported"),
        (
            "distributed_type: MULTI_GPU\nnum_processes: two",
            'num_processes: expected a number of processes (-1: not said), got "two"',
        ),
        (SEVERAL.replace("16", "15"), "num_processes 15 is no multiple of num_machines 2"),
        (SEVERAL.replace("main_process_ip: 10.0.0.1", ""), "unreadable"),
        ("a: [", "not valid YAML at line 1"),
    ],
)
def test_files_that_fit_no_launch(tmp_path: Path, text: str, says: str) -> None:
    if says == "unreadable":
        text, says = text.replace("HOSTS", "null"), "needs main_process_ip"
    with pytest.raises(UsageError) as error:
        given(tmp_path, text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert "accelerate.yaml" in str(error.value)


def test_a_launch_takes_the_file_and_options_win(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text("distributed_type: MULTI_CPU\nnum_processes: 3\nmixed_precision: fp16\n")
    options = ("--config-file", path, "--dry-run")
    told = launched(tmp_path, "", *options)
    assert (told.status, told.out.count("# process")) == (0, 3)
    told = launched(tmp_path, "", "--nproc-per-node", 2, *options)
    assert told.out.count("# process") == 2
