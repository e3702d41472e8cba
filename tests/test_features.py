"""Any two features of zerojax at once, on any program: the numbers of plain jit.

Pairs without offload are evaluated in exact arithmetic (``tests/emitted.py``); some are compiled
too, and so is offload, which is several programs.
"""

from typing import Any

import emitted
import pytest
from equal import check
from pairwise import Row, cover
from programs import PROGRAMS, ROWS, Kind

import zerojax

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
    "overlap": (True, False),
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


def valid_exactly(row: Row) -> bool:
    """Whether a row is evaluated too. Micro-batches, replica groups and parts of rows round
    gradients to bfloat16 one by one, and a convolution is a hash of all its rows."""
    parts = row.get("k", 1) > 1 or "replica" in row.get("mesh", "") or "seq" in row.get("mesh", "")
    if row.get("bf16") and (parts or row.get("program") in BY_COMPILE_IN_BFLOAT16):
        return False
    apart = row.get("k", 1) > 1 and row.get("program") == "tables_convolved"
    return not apart and valid(row)


BY_COMPILE_IN_BFLOAT16 = {"nnx_mlp", "lstm", "sequence_llama_scan", "nnx_partitioned",
                          "nnx_factored"}  # fmt: skip
EXACT = FACTORS | {"offload": ("none",)}
EXACT_PAIRS = cover(EXACT, valid_exactly)
# Any two features but the mesh, each mesh, each program.
LIGHT = FACTORS | {"program": [name for name in FACTORS["program"] if name not in HEAVY]}
COMPILED = cover(LIGHT, valid, within=("stage", "k", "bf16", "offload", "hpz"))
FEW = len(COMPILED)
COMPILED += cover(LIGHT, valid, within=("mesh",), given=COMPILED)
COMPILED += cover(FACTORS, valid, within=("program",), given=COMPILED)
COMPILED += cover(LIGHT, valid, within=("offload", "mesh"), given=COMPILED)


def written(row: Row) -> str:
    return "-".join(f"{name}:{value}" for name, value in row.items())


def options(row: Row) -> dict[str, Any]:
    chosen: dict[str, Any] = {"small_array_size": 0}
    if row["offload"] != "none":
        chosen["offload_optimizer"] = "cpu"
    if row["offload"] == "both":
        chosen["offload_param"] = "cpu"
    if row["hpz"] > 1:
        chosen["zero_hpz_partition_size"] = row["hpz"]
    if row["stage"] == 3:
        chosen["stage3_max_live_parameters"] = row["live"]
    if not row["overlap"]:
        chosen["overlap_comm"] = False
    return chosen


def marked(rows: list[Row], fast: Any) -> list[Any]:
    return [
        pytest.param(row, id=written(row), marks=() if fast(i) else pytest.mark.sweep)
        for i, row in enumerate(rows)
    ]


@pytest.mark.parametrize("row", marked(EXACT_PAIRS, lambda i: i % 6 == 0))
def test_any_two_features(row: Row) -> None:
    program, axes = PROGRAMS[row["program"]], axes_of(row["mesh"])
    n = 1
    for size in axes.values():
        n *= size
    source = emitted.source(row["program"], rows_of(row["mesh"], row["k"]))
    specs = program.specs(source.create().params) if program.specs else None
    more = {"bf16": True} if row["bf16"] else {}
    mesh = zerojax.mesh(n, axes=axes)
    emitted.check(source, row["stage"], row["k"], mesh, specs=specs, **options(row), **more)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("row", marked(COMPILED, lambda i: i < FEW))
def test_compiled(row: Row) -> None:
    check(
        row["program"], row["stage"], row["k"], axes=axes_of(row["mesh"]),
        dtype="bfloat16" if row["bf16"] else None, rows=rows_of(row["mesh"], row["k"]),
        created_by_zero=True, **options(row),
    )  # fmt: skip
