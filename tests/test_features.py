"""Any two features of zerojax at once, on any program: the numbers of plain jit."""

from typing import Any

import pytest
from equal import check
from pairwise import Row, cover
from programs import PROGRAMS, ROWS, Kind

from zerojax.plan import rule

pytestmark = pytest.mark.usefixtures("quick_compile", "all_are_large")

FACTORS: dict[str, tuple[Any, ...]] = {
    "program": (
        "mlp", "tied", "odd", "frozen", "convnet", "gpt_scan_remat", "nnx_mlp", "nnx_gpt",
        "mean_teacher", "tables_convolved", "lstm", "loss_masked_regularized",
        "partitioned", "logical", "nnx_partitioned", "gpt_megatron", "gpt_scan_remat_megatron",
        "logical_factored", "nnx_factored", "specs_factored",
        "reused_extra_state", "nnx_reused_lookup", "reused_rounded", "nnx_reused_frozen",
        "reused_twice", "nnx_reused_curved", "reused_penalized", "nnx_reused_experts",
        "sequence_llama_scan", "sequence_llama", "sequence_gpt", "sequence_own", "sequence_unaware",
    ),
    "stage": (0, 1, 2, 3),
    "k": (1, 4),
    "mesh": (
        "data=8", "data=7", "data=6", "data=5", "data=3", "replica=2,data=4", "replica=4,data=2",
        "data=2,model=4", "data=4,fsdp=1,tensor=2", "data=2,fsdp=2,tensor=2",
        "replica=2,data=2,fsdp=1,tensor=2", "data=4,seq=2", "data=2,seq=4", "data=1,seq=8",
        "replica=2,data=2,seq=2",
    ),
    "bf16": (False, True),
    "offload": ("none", "optimizer", "both"),
    "hpz": (1, 2),
    "live": (0, 200, 10**12),
}  # fmt: skip
"""``live``: how many parameters may stay gathered over a step at stage 3."""


# They take seconds to compile.
HEAVY = {
    "tables_convolved", "lstm", "nnx_gpt", "gpt_megatron", "gpt_scan_remat_megatron",
    "sequence_llama_scan", "sequence_llama", "sequence_gpt",
}  # fmt: skip
# They compute with the parameters that they have just updated, which offload refuses.
UPDATED_IN_STEP = {"mean_teacher"}


def axes_of(mesh: str) -> dict[str, int]:
    return {name: int(n) for name, _, n in (axis.partition("=") for axis in mesh.split(","))}


def rows_of(mesh: str, k: int) -> int:
    """How many rows of a batch its devices can share."""
    axes = axes_of(mesh)
    each = k * axes["data"] * axes.get("replica", 1)
    return ROWS // each * each


def valid(row: Row) -> bool:
    """Whether the features go together; what is refused has tests of its own."""
    program = PROGRAMS[row["program"]] if "program" in row else None
    axes = axes_of(row["mesh"]) if "mesh" in row else None
    if row.get("stage", 3) < 3 and (
        row.get("hpz", 1) > 1 or row.get("live") or row.get("offload") == "both"
    ):
        return False
    if row.get("stage") == 0 and row.get("offload", "none") != "none":
        return False
    if row.get("hpz", 1) > 1 and (
        row.get("offload", "none") != "none" or (axes and (axes["data"] % 4 or "replica" in axes))
    ):
        return False
    if program:
        if axes and not {*program.axes} <= {*axes}:
            return False
        if axes and axes.get("fsdp", 1) > 1 and "fsdp" not in program.axes:
            return False
        if axes and "seq" in axes and not program.tokens:
            return False
        if row.get("bf16") and "bfloat16" not in program.dtypes:
            return False
        if row.get("offload", "none") != "none" and program.name in UPDATED_IN_STEP:
            return False
        if row.get("k", 1) > 1 and program.accumulated.kind is not Kind.EQUAL:
            return False
    return True


# Any two features but the mesh, each mesh, each program; then all pairs, but those of a mesh and a
# program that takes seconds.
LIGHT = FACTORS | {"program": [name for name in FACTORS["program"] if name not in HEAVY]}
FEW = cover(LIGHT, valid, within=FACTORS.keys() - {"program", "mesh"})
FEW += cover(LIGHT, valid, within=("mesh",), given=FEW)
FEW += cover(LIGHT, valid, within=("program",), given=FEW)
ALL = cover(LIGHT, valid, given=FEW)
ALL += cover(FACTORS, valid, within=FACTORS.keys() - {"mesh"}, given=FEW + ALL)


@pytest.fixture
def all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise arrays as small as these are replicated, or gathered together."""
    monkeypatch.setattr(rule, "SMALL", 0)


def written(row: Row) -> str:
    return "-".join(f"{name}:{value}" for name, value in row.items())


@pytest.mark.parametrize(
    "row",
    [
        *(pytest.param(row, id=written(row)) for row in FEW),
        *(pytest.param(row, id=written(row), marks=pytest.mark.sweep) for row in ALL),
    ],
)
def test_any_two_features(row: Row) -> None:
    options: dict[str, Any] = {}
    if row["offload"] != "none":
        options["offload_optimizer"] = "cpu"
    if row["offload"] == "both":
        options["offload_param"] = "cpu"
    if row["hpz"] > 1:
        options["zero_hpz_partition_size"] = row["hpz"]
    if row["stage"] == 3:
        options["stage3_max_live_parameters"] = row["live"]
    check(
        row["program"], row["stage"], row["k"], axes=axes_of(row["mesh"]),
        dtype="bfloat16" if row["bf16"] else None, rows=rows_of(row["mesh"], row["k"]),
        created_by_zero=True, **options,
    )  # fmt: skip
