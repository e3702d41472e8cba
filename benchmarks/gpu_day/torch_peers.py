"""The models of ``gpu_day`` in torch: FSDP2 with compiled blocks, and DeepSpeed by the same JSON.

transformers' models from random weights, bf16 over fp32 masters, AdamW fused, blocks checkpointed,
the loss compiled; one process.
"""

import importlib
import importlib.util
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks.gpu_day import models
from benchmarks.gpu_day.training import JSON
from zerojax.devices.rates import rates

LEARNING_RATE = 3e-4


def fsdp(
    size: Mapping[str, Any], rows: int, seq: int, steps: int = 8, compiled: bool = True
) -> dict[str, Any]:
    """FSDP2 (``fully_shard``), each block compiled as torchtitan does."""
    torch = _torch()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    distributed: Any = importlib.import_module("torch.distributed")
    parallel: Any = importlib.import_module("torch.distributed.fsdp")
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh(device, (1,))
        model, blocks = _model(torch, size, device)
        policy = parallel.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32
        )
        for block in blocks:
            if compiled:
                block.compile()
            parallel.fully_shard(block, mesh=mesh, mp_policy=policy)
        parallel.fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        loss_of = _loss(torch, compiled)

        def step(inputs: Any, targets: Any) -> Any:
            loss = loss_of(model(input_ids=inputs, use_cache=False).logits, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        return _run(torch, step, size, rows, seq, steps, device)
    finally:
        distributed.destroy_process_group()


def deepspeed(
    size: Mapping[str, Any], rows: int, seq: int, stage: int = 3, steps: int = 8
) -> dict[str, Any]:
    """DeepSpeed by zerojax's JSON, with torch's AdamW, which needs no build of its own."""
    torch = _torch()
    if importlib.util.find_spec("deepspeed") is None:
        raise ModuleNotFoundError("deepspeed is not installed here, and no wheel of it was carried")
    os.environ.setdefault("LOCAL_RANK", "0")  # as DeepSpeed's launcher sets it
    library: Any = importlib.import_module("deepspeed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    distributed: Any = importlib.import_module("torch.distributed")
    backend = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(backend, store=distributed.HashStore(), rank=0, world_size=1)
    model, _ = _model(torch, size, device)
    adamw = {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}}
    config = {
        **JSON,
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": 1,
        "optimizer": adamw,
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
    loss_of = _loss(torch, compiled=True)

    def step(inputs: Any, targets: Any) -> Any:
        loss = loss_of(engine(input_ids=inputs, use_cache=False).logits, targets)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return _run(torch, step, size, rows, seq, steps, device)


def _torch() -> Any:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"{name} is not installed here")
    return importlib.import_module("torch")


def _model(torch: Any, size: Mapping[str, Any], device: str) -> tuple[Any, Any]:
    """A model of transformers in training, and its blocks."""
    library: Any = importlib.import_module("transformers")
    shared = {"vocab_size": size["vocab_size"], "use_cache": False, "attn_implementation": "sdpa"}
    with torch.device(device):
        if size["family"] == "gpt":
            config = library.GPT2Config(
                n_positions=size["block_size"], n_embd=size["n_embd"], n_layer=size["n_layer"],
                n_head=size["n_head"], resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **shared,
            )  # fmt: skip
            model = library.GPT2LMHeadModel(config)
        else:
            config = library.LlamaConfig(
                hidden_size=size["n_embd"], intermediate_size=size["n_inner"],
                num_hidden_layers=size["n_layer"], num_attention_heads=size["n_head"],
                num_key_value_heads=size["n_kv_head"], max_position_embeddings=size["block_size"],
                tie_word_embeddings=False, **shared,
            )  # fmt: skip
            model = library.LlamaForCausalLM(config)
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    inner = model.transformer.h if size["family"] == "gpt" else model.model.layers
    return model, inner


def _loss(torch: Any, compiled: bool) -> Callable[[Any, Any], Any]:
    def loss(logits: Any, targets: Any) -> Any:
        flat = logits.float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, targets.flatten())

    return torch.compile(loss) if compiled else loss


def _run(
    torch: Any, step: Callable[..., Any], size: Mapping[str, Any], rows: int, seq: int,
    steps: int, device: str,
) -> dict[str, Any]:  # fmt: skip
    """As :func:`benchmarks.gpu_day.models.run_steps` and ``figures`` have it for JAX."""
    on_gpu = device == "cuda"
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    tokens = torch.randint(0, size["vocab_size"], (rows, seq + 1), device=device)
    batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def timed(calls: int) -> tuple[float, Any]:
        begun = time.perf_counter()
        for _ in range(calls):
            loss = step(*batch)
        wait()
        return (time.perf_counter() - begun) / calls, loss

    compiled, first = timed(1)
    for _ in range(2):
        timed(1)
    each = [timed(1)[0] for _ in range(steps)]
    in_a_row, last = timed(steps)
    rate = rows * seq / in_a_row
    share = None
    if on_gpu:
        kind = torch.cuda.get_device_name()
        peak = next((rates(k).matrix["bf16"] for k in ("h100", "h200") if k.upper() in kind), None)
        share = peak and rate * models.flops_a_token(size, seq) / peak
    return {
        "first": compiled,
        "each": statistics.median(each),
        "in_a_row": in_a_row,
        "losses": (float(first), float(last)),
        "rows": rows,
        "seq": seq,
        "tokens_per_second": rate,
        "mfu": share,
        "bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "versions": dict(_versions()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in ("torch", "transformers", "deepspeed"):
        if importlib.util.find_spec(name):
            yield name, importlib.import_module(name).__version__
