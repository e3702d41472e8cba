"""The tables of Llamas: what trains on eight A100s and how fast, and the model states of 70B."""

from benchmarks.published_steps import llama_of
from benchmarks.published_tables import (
    GIGA,
    Opener,
    Row,
    Section,
    Setup,
    detail,
    figures,
    fits,
    giga,
    states,
)
from zerojax.foresight.choice import Choice, Offload
from zerojax.foresight.forecast import Forecast

GPUS = 8
SEQ = 2048
MICROS = (1, 4)
BOTH: Offload = "optimizer and parameters"
# Size, stage, what is offloaded, tokens/s as published.
RUNS: tuple[tuple[str, int, Offload, int], ...] = (
    ("7b", 2, "none", 7000),
    ("13b", 2, "none", 3500),
    ("30b", 3, "none", 1200),
    ("65b", 3, BOTH, 400),
)
# Bytes of P parameters at each stage, of which a part is cut among the GPUs.
FORMULAS = {0: (16, 0), 1: (4, 12), 2: (2, 14), 3: (0, 16)}
NOMINAL = 70 * 10**9


def speeds(opened: Opener) -> Section:
    """Four Llamas on eight A100s."""
    rows, by_size = [], {}
    for size, stage, offload, published in RUNS:
        setup = Setup(
            function=llama_of(f"llama-{size}"),
            devices=f"a100:{GPUS}",
            seq=SEQ,
            precision="bf16",
            remat=True,
        )
        study = opened(setup)
        each = {
            micro: study.forecast(Choice(stage=stage, micro=micro, remat=True, offload=offload))
            for micro in MICROS
        }
        what = f"{size[:-1]}B, ZeRO-{stage}{'' if offload == 'none' else ' + offload'}"
        rows.append(_speed(what, published, each, offload))
        by_size[size] = {str(micro): figures(forecast) for micro, forecast in each.items()}
    return Section(
        name="llama",
        title="Llama 7B, 13B, 30B, 65B on 8 x A100 80 GB",
        source="As the project's issue quotes it; where it was first published was not found, so "
        "that sequence length, batch and kernels are unknown. Open-Llama's figures of 2023 are of "
        "the same sizes, but of 48 GPUs (https://github.com/s-JoL/Open-Llama/issues/60).",
        ours=f"Sequences of {SEQ}, bf16, AdamW, blocks in a scan, rematerialised. The roofline "
        "has matrix products at 70% of their peak, transfers at 80 to 90% of theirs and 2 us a "
        "kernel; it knows no waiting for the host, no other user of PCIe and no optimizer on a "
        "CPU. Its shares are not yet measured on an A100.",
        rows=tuple(rows),
        figures=by_size,
    )


def _speed(what: str, published: int, forecasts: dict[int, Forecast], offload: Offload) -> Row:
    first = next(iter(forecasts.values()))
    fast = [
        f"{each.tokens_per_second:,.0f} tokens/s" if each.fits else "does not fit"
        for each in forecasts.values()
    ]
    parts = (f"at {n} a GPU {text}" for n, text in zip(forecasts, fast, strict=True))
    peak = max(first.rates.matrix.values())
    of_all = 6 * first.parameters * published / (peak * GPUS)
    why = (
        f"as tokens/s of all {GPUS} GPUs, {of_all:.0%} of the matrix peak, against "
        f"{first.mfu:.0%} at 1 a GPU here: the roofline is what the program allows, not what "
        f"launches, host and allocator leave of it; of one GPU it would be {of_all * GPUS:.0%}"
    )
    room = detail(first)
    if offload != "none":
        room += f"; {giga(first.host_bytes)} GB of host memory a GPU"
        why += ". DeepSpeed's Adam runs on the CPU's cores, here its state streams through the GPU"
    computed = f"{fits(first)}; {', '.join(parts)}"
    return Row(what, f"fits; {published:,} tokens/s", computed, room, why)


def model_states(opened: Opener) -> Section:
    """Llama 70B at each stage on eight GPUs."""
    setup = Setup(
        function=llama_of("llama-70b"),
        devices=f"h100:{GPUS}",
        seq=128,
        precision="bf16",
        remat=True,
    )
    study = opened(setup)
    choices = {stage: Choice(stage=stage, micro=1, remat=True) for stage in FORMULAS}
    forecasts = {stage: study.forecast(choice) for stage, choice in choices.items()}
    return Section(
        name="states",
        title=f"Model states of a 70B model on {GPUS} GPUs, GB a GPU",
        source="Rajbhandari et al. 2020, ZeRO (arXiv:1910.02054), section 5: 2 + 2 + 12 bytes a "
        "parameter (fp16 weights and gradients, fp32 masters and moments), as in DeepSpeed.",
        ours="Llama 70B (69.0B parameters), bf16, AdamW, blocks in a scan, rematerialised, rows of "
        "128 to leave the activations small; parameters, gradients and optimizer state at the "
        "peak of the step, gathered ones included. At rest zerojax has no 16-bit weights and no "
        "gradients: 12 bytes.",
        rows=tuple(_states(stage, each) for stage, each in forecasts.items()),
        figures={f"stage {stage}": figures(each) for stage, each in forecasts.items()},
    )


def formula(stage: int, parameters: int, gpus: int) -> float:
    """Bytes of model states of one GPU, as the paper counts them.

    >>> [formula(stage, 70 * 10**9, 8) / 1e9 for stage in range(4)]
    [1120.0, 385.0, 262.5, 140.0]
    """
    replicated, sharded = FORMULAS[stage]
    return parameters * (replicated + sharded / gpus)


def _states(stage: int, forecast: Forecast) -> Row:
    replicated, sharded = FORMULAS[stage]
    terms = [f"{replicated}P"] * bool(replicated) + [f"{sharded}P/{GPUS}"] * bool(sharded)
    nominal, own = (formula(stage, p, GPUS) / GIGA for p in (NOMINAL, forecast.parameters))
    resting = forecast.plan.bytes_per_device
    in_all = resting * (GPUS if stage else 1) / forecast.parameters
    return Row(
        f"stage {stage}",
        f"{' + '.join(terms)} = {nominal:,.1f} ({own:,.1f} of {forecast.parameters / GIGA:.1f}B)",
        f"{states(forecast) / GIGA:,.1f}",
        f"at rest {giga(resting)}, {in_all:.1f} bytes a parameter in all",
        STATES_WHY[stage],
    )


_TWICE = (
    "all weights are gathered before the forward pass, and the largest stack of layers "
    "(37.6 GB) is there twice meanwhile, before and after its transposition"
)
STATES_WHY = {
    0: "the same 16 bytes",
    1: f"without accumulation no unsharded gradients are kept (2P less); {_TWICE}",
    2: f"{_TWICE}; the gradients are not there yet",
    3: "the same 16 bytes, all cut; a layer's gathered weights are in it",
}
