"""Trains with and without offload, and says by one JSON line a case how the two runs compare.

A process of its own, for its XLA flags: without them XLA on CPU rounds differently in programs that
are cut differently (fused multiply-add, divisions by a constant, 16-bit values kept in 32).
"""

import json
import os
import sys
import tempfile
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FLAGS = "--xla_cpu_max_isa=AVX --xla_disable_hlo_passes=algsimp --xla_allow_excess_precision=false"
STEPS = 30
CPU = {"offload_optimizer": "cpu"}
PARAM = {"offload_param": "cpu"}
NVME = {"offload_optimizer": {"device": "nvme", "buffer_count": 2}}
BOTH_NVME = NVME | {"offload_param": {"device": "nvme", "buffer_count": 2, "max_in_cpu": 300}}
HALF = {"offload_optimizer": {"device": "cpu", "ratio": 0.5}}
CLIP = {"gradient_clipping": 0.1}
TWICE = {"gradient_accumulation_steps": 2}
FP16 = CLIP | {
    "fp16": True, "initial_scale_power": 30, "hysteresis": 1, "loss_scale_window": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A config with something offloaded, beside the same without.

    Attributes:
      offload: keywords of one of the two; ``base`` those of both.
      program: of ``programs.PROGRAMS``.
      sweep: shows what other cases show, elsewhere.
    """

    name: str
    offload: dict[str, Any]
    stage: int = 3
    program: str = "mlp"
    base: dict[str, Any] = field(default_factory=lambda: CLIP)
    devices: int = 2
    replicas: int | None = None
    sweep: bool = False

    @property
    def place(self) -> str:
        """Where its state lies at rest, besides the device."""
        return "disk" if "nvme" in json.dumps(self.offload) else "host"


CASES = [
    Case("cpu, stage 2, fp16", CPU, 2, base=FP16),
    Case("cpu, stage 2, bf16", CPU, 2, base={"bf16": True}, sweep=True),
    Case("cpu, stage 1, accumulation", CPU, 1, base=FP16 | TWICE),
    Case("cpu, one device", CPU, 2, devices=1, sweep=True),
    Case("cpu, ratio", HALF, 2),
    Case("nvme, stage 3, fp16", NVME, base=FP16, devices=8, sweep=True),
    Case("param", PARAM, program="gpt_scan_remat"),
    Case("both, nnx", CPU | PARAM, program="nnx_mlp", sweep=True),
    Case("both, dropout", CPU | PARAM, program="gpt_dropout", sweep=True),
    Case("both, scanned, replicas", CPU | PARAM, 3, "gpt_scan_remat", devices=8, replicas=2),
    Case("both nvme", BOTH_NVME, program="gpt_scan_remat"),
    Case("both nvme, fp16, accumulation", BOTH_NVME, base=FP16 | TWICE, sweep=True),
]


def main(out: str, *names: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    jax.config.update("jax_disable_most_optimizations", True)  # compiles in a third of the time
    with tempfile.TemporaryDirectory() as disk, open(out, "a", buffering=1) as lines:
        for case in CASES:
            if case.name in names:
                try:
                    told = compared(case, disk)
                except Exception:
                    told = {"error": traceback.format_exc()}
                lines.write(json.dumps(told | {"case": case.name}) + "\n")


def compared(case: Case, disk: str) -> dict[str, Any]:
    """Trains as the case says."""
    import jax
    import numpy as np

    offload = {
        section: given | {"nvme_path": disk} if "buffer_count" in given else given
        for section, given in case.offload.items()
    }
    got, want = train(case, offload | {"sub_group_size": 240}), train(case, {})
    named = zip(jax.tree_util.tree_leaves_with_path(got[0]), jax.tree.leaves(want[0]), strict=True)
    differs = {
        jax.tree_util.keystr(path): float(np.max(np.abs(np.asarray(a, float) - b), initial=0))
        for (path, a), b in named
        if a.dtype != b.dtype or not np.array_equal(a, b, equal_nan=True)
    }
    return {"differs": differs, "skipped": got[1], "places": got[2]}


def train(case: Case, offload: dict[str, Any]) -> tuple[Any, int, list[str]]:
    """The results of each step with the last state; how many steps were skipped; the places."""
    from equal import follow, start
    from programs import PROGRAMS

    import zerojax

    zero = zerojax.zero(
        stage=case.stage,
        mesh=zerojax.mesh(case.devices, replicas=case.replicas),
        stage3_param_persistence_threshold=20,
        **case.base,
        **offload,
    )
    program, skipped = PROGRAMS[case.program], [0]
    state = zero.init(lambda: start(case.program, "float32"))
    places = sorted({leaf.place for leaf in zero.plan(state).all_leaves()})
    step = zero(scaled_step if "fp16" in case.base else program.step)

    def watched(*args: Any) -> Any:
        out = step(*args)
        after = args[1] if program.nnx else out[0]
        skipped[0] = int(zerojax.telemetry(after)["skipped_steps"])
        return out

    return follow(program, watched, state, steps=STEPS), skipped[0], places


def scaled_step(state: Any, batch: Any) -> Any:
    """The step of the program "mlp", with the loss scale of fp16."""
    from programs.program import squared

    import zerojax

    grad = zerojax.value_and_grad(lambda params: squared(state, params, batch))
    loss, grads = grad(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


if __name__ == "__main__":
    main(*sys.argv[1:])
