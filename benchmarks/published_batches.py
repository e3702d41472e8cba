"""The tables of largest batches: GPT-2 XL on one GPU, an encoder on two.

Both are of Hugging Face's "Accelerate Large Model Training using DeepSpeed" (2022,
https://huggingface.co/blog/accelerate-deepspeed), whose commands give the batch of each GPU.
"""

from typing import Any

from benchmarks.published_search import Largest, find_largest
from benchmarks.published_steps import encoder, gpt2_xl
from benchmarks.published_tables import (
    Opener,
    Row,
    Section,
    Setup,
    detail,
    figures,
    fits,
    giga,
    largest_detail,
    states,
)
from zerojax.foresight.choice import Choice

BLOG = "https://huggingface.co/blog/accelerate-deepspeed"
PLAIN, TWO = Choice(stage=0, micro=1), Choice(stage=2, micro=1)
OFFLOADED = Choice(stage=3, micro=16, offload="optimizer and parameters")
# Bytes a parameter, by count: of torch's AMP, Adam and DDP, and of DeepSpeed's ZeRO-2 on two GPUs.
ENCODER_ROWS = 8, 40  # published, without ZeRO and at stage 2
AMP_BYTES, ZERO2_BYTES = 22, 2 + 14 // 2
AMP = (
    "torch's AMP and DDP hold 22 bytes a parameter by count (fp32 weights, gradients and moments "
    "16, what autocast casts 2, DDP's buckets 4)"
)


def gpt2(opened: Opener) -> Section:
    """GPT-2 XL in blocks of 128 on one 24 GB GPU."""
    study = opened(Setup(function=gpt2_xl, devices="titan-rtx:1", seq=128))
    plain, offloaded = study.forecast(PLAIN), study.forecast(OFFLOADED)
    largest = find_largest(study, OFFLOADED, start=OFFLOADED.micro)
    torch = AMP_BYTES * plain.parameters
    rows = (
        Row(
            "data parallelism (stage 0), batch 1",
            "does not fit",
            fits(plain),
            detail(plain),
            f"{AMP}, {giga(torch)} GB; here it is fp32 masters and moments, fp16 weights and "
            f"gradients, 16 bytes, {giga(states(plain))} GB: either is too much",
        ),
        Row(
            "ZeRO-3, optimizer and parameters offloaded, batch 16",
            "fits",
            fits(offloaded),
            f"{detail(offloaded)}; {giga(offloaded.host_bytes)} GB of host memory",
            "with the state in host memory the device holds a layer and the activations; the "
            "Adam of the published run ran on the CPU, here it streams through the GPU",
        ),
        Row(
            "the same, largest batch",
            "16",
            str(largest.micro),
            largest_detail(largest),
            "whether more than 16 was tried is not said. Activations decide; beside them DeepSpeed "
            "keeps up to 10^9 gathered parameters (2 GB), its buckets and dropout's masks",
        ),
    )
    return Section(
        title="GPT-2 XL (1.5B) on one 24 GB GPU, blocks of 128",
        source=f"{BLOG}, table 3: fp16, AdamW, one Titan RTX.",
        ours="The same device, fp16, AdamW; no dropout, blocks in a scan, no remat.",
        rows=rows,
        figures={"plain": figures(plain), "offloaded": figures(offloaded)} | _figures(largest),
    )


def classifier(opened: Opener) -> Section:
    """The encoder of 900M parameters on two 24 GB GPUs, by data parallelism and by ZeRO-2."""
    study = opened(Setup(function=encoder, devices="titan-rtx:2", seq=128))
    plain, two = (
        find_largest(study, choice, start=published)
        for choice, published in zip((PLAIN, TWO), ENCODER_ROWS, strict=True)
    )
    room, parameters = plain.above.rates.room, plain.above.parameters
    torch, deepspeed = AMP_BYTES * parameters, ZERO2_BYTES * parameters
    rows = (
        Row(
            "data parallelism (stage 0), largest batch a GPU",
            str(ENCODER_ROWS[0]),
            str(plain.micro),
            largest_detail(plain),
            f"{AMP}, {giga(torch)} GB, here {giga(states(plain.above))}. What that leaves is "
            f"{(room - torch) / plain.row_bytes:.0f} of the rows here; its rows carry dropout's "
            "masks, but are padded to the longest of a batch only",
        ),
        Row(
            "ZeRO-2, largest batch a GPU",
            str(ENCODER_ROWS[1]),
            str(two.micro),
            largest_detail(two),
            f"DeepSpeed holds 2 + 14/2 bytes a parameter, {giga(deepspeed)} GB, and its buckets; "
            f"here it is {giga(states(two.above))} GB. That leaves the published batch at most "
            f"{(room - deepspeed) / ENCODER_ROWS[1] / 1e6:.0f} MB a row. Rows differ both ways: "
            "there padded to the longest of a batch only and in fp16 throughout, but with "
            "dropout's masks; how near the two come is partly chance",
        ),
    )
    return Section(
        title="900M encoder (DeBERTa-v2 XLarge) on 2 x 24 GB, length 128",
        source=f"{BLOG}, table 1: fp16, Adam, 2 Titan RTX; batches of each GPU, as "
        "per_device_train_batch_size in its commands.",
        ours="The same devices, fp16, AdamW; no dropout, blocks in a scan, no remat. Disentangled "
        "attention is in it, the convolution after the first layer is not.",
        rows=rows,
        figures=_figures(plain, "plain") | _figures(two, "zero2"),
    )


def _figures(largest: Largest, name: str = "largest") -> dict[str, Any]:
    return {
        name: {
            "micro": largest.micro,
            "row_bytes": largest.row_bytes,
            "compiled": largest.compiled,
            "fitting": figures(largest.fitting) if largest.fitting else None,
            "above": figures(largest.above),
        }
    }
