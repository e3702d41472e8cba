"""Memory that tiling of loss and MLP saves on long rows, and the longest row that fits; no GPU.

    python -m benchmarks.long_rows                              # ten compiles, minutes
    python -m benchmarks.long_rows --record benchmarks/records

Llama 3 8B on eight H100s, one row of 131,072 tokens each. Then the longest row of one H100, and of
eight that share the row's tokens (a mesh axis "seq"), with the optimizer's state and what blocks
keep in host memory. Needs ``pip install -e '.[compile,examples]'`` and no GPU.
"""

import argparse
import dataclasses
from collections.abc import Sequence

from benchmarks.frame import Answer, Table, question, say
from benchmarks.published_steps import fused_llama
from benchmarks.published_tables import GIGA, Setup, giga, open_study
from zerojax.foresight.attribution import ACTIVATIONS, LOGITS
from zerojax.foresight.choice import Choice, Offload
from zerojax.models import llama

SEQ, DEVICES = 131072, 8
TILES: tuple[tuple[int | None, int | None], ...] = ((None, None), (32, None), (32, 16))
OPTIMIZER: Offload = "optimizer"
BOTH: Offload = "optimizer and parameters"


@dataclasses.dataclass(frozen=True)
class Case:
    """A step to compile.

    Attributes:
      devices, tokens: The number of H100s, and of tokens in a row.
      goal: The purpose of the case.
      loss, mlp: The number of tiles of the loss and of the MLP; None for one.
      shared: Whether all devices share the tokens of one row, and blocks keep their inputs in host
        memory; else each device has a row.
      offload: The part of the state in host memory.
    """

    devices: int
    tokens: int
    goal: str = ""
    loss: int | None = 128
    mlp: int | None = 64
    shared: bool = True
    offload: Offload = "none"

    @property
    def name(self) -> str:
        if not self.shared:
            return f"{self.loss or 1}, {self.mlp or 1}"
        return f"{self.devices}, {self.tokens:,}, {self.offload}: {self.goal}"


TILED = tuple(Case(DEVICES, SEQ, loss=loss, mlp=mlp, shared=False) for loss, mlp in TILES)
# Steps are of 65,536 tokens a GPU.
SHARED = (
    Case(1, 524288, "500 thousand", offload=OPTIMIZER),
    Case(1, 524288, "parameters in host memory as well", offload=BOTH),
    Case(1, 983040, "longest", offload=BOTH),
    Case(1, 1048576, "one step longer", offload=BOTH),
    Case(8, 3735552, "3.7 million, as ALST reports", offload=OPTIMIZER),
    Case(8, 5767168, "longest", offload=OPTIMIZER),
    Case(8, 6291456, "one step longer", offload=OPTIMIZER),
)
ABOUT = (
    "Bytes of one of 8 H100s at stage 3, bf16, AdamW, layers in a scan and rematerialised from "
    "their inputs; cuDNN's attention assumed. Compiled by XLA:GPU for absent devices."
)
ABOUT_SHARED = (
    "One row of a step, stage 3, bf16, AdamW. Eight GPUs share the row's tokens (data=1, seq=8), "
    "and ZeRO shards over both axes together. In host memory: the optimizer's state and the inputs "
    "of all 32 blocks. Loss in 128 tiles, MLP in 64; cuDNN's attention assumed, of 32 heads of "
    "all tokens, or 4 a GPU. Compiled by XLA:GPU for absent devices. Theory of Ulysses' "
    "all-to-alls: q, k, v and the result of a GPU's tokens, in the forward pass, its repetition "
    "and the backward pass, 7/8 of each sent. XLA repeats: instructions with which XLA's own pass "
    "computes a value again to save memory."
)


@dataclasses.dataclass(frozen=True)
class Step:
    """The forecast of a case: bytes of one device, and seconds.

    Attributes:
      peak, memory: Device memory at the peak, in all and by kind.
      host: Host memory for each device.
      again: Instructions with which XLA computes a value again to save memory.
      sent: Bytes sent in a step, by kind of collective.
      exchanged: Bytes of the all-to-alls by theory.
    """

    case: Case
    fits: bool
    peak: int
    memory: dict[str, int]
    host: int
    again: int
    sent: dict[str, int]
    exchanged: float
    seconds: float
    mfu: float

    @property
    def peak_giga(self) -> str:
        return f"{giga(self.peak)}{'' if self.fits else ', does not fit'}"

    @property
    def sent_giga(self) -> str:
        return ", ".join(giga(self.sent.get(k, 0)) for k in ("all-gather", "reduce-scatter"))


def compiled(case: Case) -> Step:
    """Compiles Llama 3 8B with the rows and tiles of a case."""
    say(f"compiling {case.name}")
    sizes = llama.SIZES["llama3-8b"]
    tiles = {"loss_chunks": case.loss, "mlp_chunks": case.mlp}
    setup = Setup(
        function=fused_llama(sizes | tiles, keep="nothing"),
        devices=f"h100:{case.devices}",
        seq=case.tokens,
        precision="bf16",
        remat=True,
        shared=case.devices if case.shared else 1,
        zero={"cpu_checkpointing": True} if case.shared else {},
    )
    choice = Choice(stage=3, micro=1, remat=True, offload=case.offload)
    forecast = open_study(setup).forecast(choice)
    # q and the result have all heads, k and v one for each group.
    heads = 2 * sizes["n_head"] + 2 * max(sizes["n_kv_head"], case.devices)
    width, each = sizes["n_embd"] // sizes["n_head"], case.tokens / case.devices
    bytes_a_pass = 2 * each * heads * width * sizes["n_layer"]
    return Step(
        case,
        forecast.fits,
        forecast.peak.bytes,
        dict(forecast.peak.memory),
        forecast.host_bytes,
        forecast.peak.again.instructions,
        {each.kind: each.bytes for each in forecast.traffic},
        case.shared * 3 * bytes_a_pass * (case.devices - 1) / case.devices,
        forecast.seconds,
        forecast.mfu,
    )


def tiled_rows(steps: Sequence[Step]) -> list[list[str]]:
    """Headings, and a line for each step with a row a device."""
    lines = [
        ["tiles of loss, MLP", "peak GB", "activations GB", "logits GB", "gathered, scattered GB",
         "forecast s"],
    ]  # fmt: skip
    for s in steps:
        parts = (giga(s.memory.get(kind, 0)) for kind in (ACTIVATIONS, LOGITS))
        lines.append([s.case.name, s.peak_giga, *parts, s.sent_giga, f"{s.seconds:.1f}"])
    return lines


def shared_rows(steps: Sequence[Step]) -> list[list[str]]:
    """Headings, and a line for each step with one row of all devices."""
    lines = [
        ["H100s, tokens, offloaded", "peak GB", "activations GB", "XLA repeats", "host GB a GPU",
         "gathered, scattered GB", "all-to-alls GB (theory)", "forecast s", "MFU"],
    ]  # fmt: skip
    for s in steps:
        lines.append(
            [
                s.case.name,
                s.peak_giga,
                giga(s.memory.get(ACTIVATIONS, 0)),
                str(s.again),
                f"{s.host / GIGA:.0f}",
                s.sent_giga,
                f"{giga(s.sent.get('all-to-all', 0))} ({giga(s.exchanged)})",
                f"{s.seconds:,.0f}",
                f"{s.mfu:.0%}",
            ]
        )
    return lines


def memory_rows(steps: Sequence[Step]) -> list[list[str]]:
    """Memory at each peak by kind, GB."""
    kinds = sorted({kind for s in steps for kind in s.memory})
    lines = [["H100s, tokens, offloaded", *kinds]]
    for s in steps:
        lines.append([s.case.name, *(giga(s.memory.get(kind, 0)) for kind in kinds)])
    return lines


@question("long_rows", "Llama 3 8B on long rows", absent_devices=True)
def main(options: argparse.Namespace) -> Answer:
    tiled, shared = ([compiled(case) for case in cases] for cases in (TILED, SHARED))
    parts: list[str | Table] = [
        Table(tiled_rows(tiled), title=f"A row of {SEQ:,} tokens a GPU"),
        ABOUT,
        Table(shared_rows(shared), title="One row of all GPUs"),
        ABOUT_SHARED,
        Table(memory_rows(shared), title="Memory at the peak by kind, GB"),
    ]
    return Answer({"steps": tiled, "rows": shared}, parts)


if __name__ == "__main__":
    main()
