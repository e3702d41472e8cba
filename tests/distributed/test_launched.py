"""Who launched a process, from environments as the launchers make them."""

import pytest

from zerojax.distributed.launched import Launched, LaunchError, first_host, launched

OURS = {
    "ZEROJAX_COORDINATOR": "n1:4000",
    "ZEROJAX_NUM_PROCESSES": "4",
    "ZEROJAX_PROCESS_ID": "3",
    "ZEROJAX_LOCAL_PROCESSES": "2",
    "ZEROJAX_LOCAL_PROCESS_ID": "1",
}
TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "n1",
    "MASTER_PORT": "29500",
}
# As srun of Slurm 22.05 sets them, of a step on two nodes.
SRUN = {
    "SLURM_JOB_ID": "4099",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "n[1-2]",
}
MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPI_4 = MPI | {"OMPI_MCA_orte_hnp_uri": "16781312.0;tcp://10.96.0.1,10.148.0.1:34911"}
MPI_5 = MPI | {"PMIX_NAMESPACE": "prterun-gpu-1-4098@1"}
POD = {
    "JOB_COMPLETION_INDEX": "3",
    "ZEROJAX_NUM_PROCESSES": "4",
    "ZEROJAX_COORDINATOR": "job-0.job:4000",
}
KUBEFLOW = {
    "JAX_PROCESS_ID": "3",
    "JAX_NUM_PROCESSES": "4",
    "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:6666",
}


@pytest.mark.parametrize(
    ("environ", "coordinator", "by"),
    [
        (OURS, "n1:4000", "zerojax launch"),
        (TORCHRUN, "n1:29500", "torchrun"),
        (TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": "True"}, "n1:29501", "torchrun"),
        (SRUN, "n1:61443", "srun"),
        (SRUN | {"MASTER_ADDR": "n1", "MASTER_PORT": "5", "WORLD_SIZE": "4"}, "n1:5", "srun"),
        (MPI_4, "10.96.0.1:61441", "Open MPI"),
        (MPI_5, "gpu-1:61442", "Open MPI"),
        (MPI | {"ZEROJAX_COORDINATOR": "[fe80::1]:4000"}, "[fe80::1]:4000", "Open MPI"),
        (SRUN | MPI_4, "10.96.0.1:61441", "Open MPI"),
        (SRUN | TORCHRUN, "n1:29500", "torchrun"),
        (SRUN | OURS, "n1:4000", "zerojax launch"),
    ],
)
def test_two_hosts_of_two(environ: dict[str, str], coordinator: str, by: str) -> None:
    me = launched(environ)
    assert me == Launched(coordinator, 4, 3, several_hosts=True, local_index=1, by=by)


@pytest.mark.parametrize("environ", [POD, KUBEFLOW])
def test_launchers_that_say_nothing_of_hosts(environ: dict[str, str]) -> None:
    me = launched(environ)
    assert me is not None
    assert (me.count, me.index, me.several_hosts) == (4, 3, None)


def test_on_one_host_the_derived_coordinator_is_the_host_itself() -> None:
    one_node = {"SLURM_STEP_NODELIST": "n1", "SLURM_LOCALID": "3"}
    me = launched(SRUN | one_node)
    assert me == Launched("localhost:61443", 4, 3, several_hosts=False, local_index=3, by="srun")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"},
        {"MASTER_ADDR": "n1", "MASTER_PORT": "29500"},
        # The batch script of a job of four tasks, outside of srun.
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        POD | {"JOB_COMPLETION_INDEX": "0", "ZEROJAX_NUM_PROCESSES": "1"},
    ],
)
def test_a_process_of_its_own(environ: dict[str, str]) -> None:
    assert launched(environ) is None


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        (without(TORCHRUN, "RANK"), "WORLD_SIZE=4, and RANK is not set: number the processes"),
        (without(TORCHRUN, "WORLD_SIZE"), "RANK=3 is set (torchrun), and WORLD_SIZE is not"),
        (without(TORCHRUN, "MASTER_ADDR"), "MASTER_ADDR is not: set MASTER_ADDR to the host of"),
        (without(TORCHRUN, "MASTER_PORT"), "MASTER_PORT is not"),
        (TORCHRUN | {"RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4"),
        (TORCHRUN | {"RANK": "9" * 5000}, f"RANK='{'9' * 40}' is not a number from 0 on"),
        (TORCHRUN | {"WORLD_SIZE": "0"}, "WORLD_SIZE='0' is not a number from 1 on"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, "MASTER_ADDR:MASTER_PORT='n1:70000' is not host"),
        (TORCHRUN | {"MASTER_ADDR": "http://h"}, "MASTER_PORT='http://h:29500' is not host:port"),
        (OURS | {"ZEROJAX_COORDINATOR": "n1"}, "ZEROJAX_COORDINATOR='n1' is not host:port"),
        (MPI, "Open MPI does not say where process 0 listens"),
        (without(POD, "ZEROJAX_NUM_PROCESSES"), "set ZEROJAX_NUM_PROCESSES to the Job's compl"),
        (without(POD, "ZEROJAX_COORDINATOR"), "Kubernetes does not say"),
    ],
)
def test_half_an_environment(environ: dict[str, str], says: str) -> None:
    with pytest.raises(LaunchError) as error:
        launched(environ)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node001", "node001"),
        ("node[001,007-015],host2", "node001"),
        ("r[1-2]n[3,5]-ib", "r1n3-ib"),
    ],
)
def test_first_host_of_a_list_of_slurms(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
