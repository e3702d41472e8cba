"""A pretrained model fine-tuned on text: all of it, or low-rank adapters beside a frozen base.

Command, from the repository root, with the model's folder as transformers writes it::

    python -m zerojax plan --model examples.finetune:lora_8b --config configs/zero3_bf16.json \\
        --devices rtx-4090:1 --batch 2 --seq 2048 --attention cudnn      # before you run it
    python -m examples.finetune --model_name_or_path Llama-3.1-8B/ --dataset_name chats/ \\
        --config configs/zero3_bf16.json --method lora --per_device_train_batch_size 2

The adapted products are those of Llama and its relatives. What was trained is written to
`--output_dir`: a folder for transformers, or adapters for PEFT. No GPU has run it yet; `plan`
forecasts 18.6 GB and 2,255 tokens/s for the first command.
"""

import enum
import functools
import json
import pathlib
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import qwix
import typer
from flax.training.train_state import TrainState
from flax.traverse_util import flatten_dict, unflatten_dict

import zerojax
from examples.command import Command, command
from examples.run_clm import data
from zerojax.models import from_folder
from zerojax.models.attention import planned_attention
from zerojax.models.names import Decoder, llama3_8b
from zerojax.models.tokenizer import load_tokenizer
from zerojax.weights import Names, Tensor

ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, ALPHA = 8, 16
PEFT = "base_model.model.model.layers.{layer}.{x}."
NAMES = Names(
    {
        "layers/{x:path}/kernel_lora_a": Tensor(PEFT + "lora_A.weight", "r i -> layer i r"),
        "layers/{x:path}/kernel_lora_b": Tensor(PEFT + "lora_B.weight", "o r -> layer r o"),
    }
)
"""The tensors of adapters as PEFT names them."""

app = typer.Typer(add_completion=False)


class Method(enum.StrEnum):
    full = "full"
    lora = "lora"
    qlora = "qlora"


class Tuned(TrainState):
    """The parameters that are trained, beside those that are not: none in a full fine-tuning."""

    base: Any


def in_bf16(base: Any, zero: zerojax.Zero) -> Any:
    """The base with its floating arrays in bfloat16, if the config computes in it."""
    low = jnp.bfloat16 if zero.config.bf16 else jnp.float32
    return jax.tree.map(lambda x: x.astype(low) if x.dtype == jnp.float32 else x, base)


def workload(model: Any, method: Method, zero: zerojax.Zero, rows: int, seq: int) -> Any:
    """State and step, of {"tokens": int32 [rows, seq + 1]}, for `plan` and for a run.

    The base is bfloat16 if the config computes in it, and with `qlora` its products have nf4 codes,
    of which 64 inputs share a scale; adapters have float32 masters.
    """
    if method != Method.full:
        how: Any = {"weight_qtype": "nf4", "tile_size": 64} if method == Method.qlora else {}
        of = f".*({'|'.join(ADAPTED)})"
        adapters = qwix.LoraProvider(module_path=of, rank=RANK, alpha=float(ALPHA), **how)
        model = qwix.apply_lora_to_model(model, adapters)

    def create_state(key: jax.Array) -> Tuned:
        params = flatten_dict(model.init(key, jnp.zeros((1, 8), jnp.int32))["params"])
        trained = {k: x for k, x in params.items() if method == Method.full or "lora" in k[-1]}
        base = {k: x for k, x in params.items() if k not in trained}
        trained, base = unflatten_dict(trained), in_bf16(unflatten_dict(base), zero)
        return Tuned.create(apply_fn=model.apply, params=trained, base=base, tx=zero.optimizer())

    def train_step(state: Tuned, batch: Any) -> tuple[Tuned, Any]:
        inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]

        def loss_fn(params: Any) -> jax.Array:
            both = unflatten_dict(flatten_dict(params) | flatten_dict(state.base))
            losses: Any = state.apply_fn({"params": both}, inputs, targets=targets)
            return losses.mean()  # type: ignore[no-any-return]

        loss, grads = zerojax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    batch = {"tokens": jax.ShapeDtypeStruct((rows, seq + 1), jnp.int32)}
    return zerojax.Workload(create_state, train_step, batch, rows * seq)


def planned(
    decoder: Decoder[Any], method: Method, zero: zerojax.Zero, rows: int, seq: int,
    remat: bool = True, attention: str = "auto",
) -> Any:  # fmt: skip
    """The workload of a model of known sizes, for `zerojax plan --model`."""
    return workload(decoder(seq, remat, zero=zero, attention=attention), method, zero, rows, seq)


full_8b = functools.partial(planned, llama3_8b, Method.full)
lora_8b = functools.partial(planned, llama3_8b, Method.lora)
qlora_8b = functools.partial(planned, llama3_8b, Method.qlora)


def started(loaded: Any, work: Any, zero: zerojax.Zero) -> Tuned:
    """The state with the folder's weights. Codes are made of a base in bfloat16, beside it."""
    key = jax.random.key(0)
    like = zero.abstract_state(work.create_state, key).base
    # Without a base, as a random one would need memory beside the folder's.
    state = zero.init(lambda key: work.create_state(key).replace(base={}), key)
    if not like:
        return state.replace(params=loaded.load(state.params))
    plain = workload(loaded.model, Method.lora, zero, 1, 8)
    base = loaded.load(zero.abstract_state(plain.create_state, key).base)
    if len(jax.tree.leaves(base)) == len(jax.tree.leaves(like)):  # no codes with scales
        return state.replace(base=base)
    one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), like["layers"])

    def quantized(base: Any) -> Any:  # layer by layer, as nf4 compares a weight with 16 values
        layers = jax.lax.map(lambda layer: qwix.quantize_params(layer, one), base["layers"])
        return in_bf16(base | {"layers": layers}, zero)

    places = jax.tree.map(lambda x: x.sharding, like)
    return state.replace(base=jax.jit(quantized, out_shardings=places)(base))


def save(loaded: Any, state: Tuned, folder: pathlib.Path) -> None:
    """Writes a folder for transformers, or the adapters for PEFT."""
    if not state.base:
        return loaded.save(folder, state.params)  # type: ignore[no-any-return]
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA}
    about |= {"target_modules": ADAPTED, "base_model_name_or_path": str(loaded.folder)}
    texts = {"adapter_config.json": json.dumps(about)}
    zerojax.weights.save(folder, state.params, NAMES, texts=texts)
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")


@app.command(cls=Command, help="Fine-tune a decoder of a Hugging Face folder on text.")
def main(
    model_name_or_path: Annotated[pathlib.Path, typer.Option(help="config, weights, tokenizer")],
    dataset_name: Annotated[str, typer.Option(help="a folder, as for examples.run_clm")],
    config: Annotated[pathlib.Path, typer.Option(help="DeepSpeed JSON, or Accelerate's YAML")],
    method: Annotated[Method, typer.Option(help="what is trained")] = Method.lora,
    block_size: Annotated[int, typer.Option(min=1, help="tokens of a row")] = 2048,
    per_device_train_batch_size: Annotated[int, typer.Option(min=1, help="rows")] = 2,
    max_train_steps: Annotated[int, typer.Option(min=1)] = 100,
    output_dir: Annotated[pathlib.Path, typer.Option()] = pathlib.Path("runs/finetune"),
) -> None:
    with command(ValueError, OSError, ImportError, zerojax.OutOfMemoryError) as console:
        zero = zerojax.zero(config)
        loaded = from_folder(model_name_or_path, zero=zero, parameters=False, scan=True, remat=True)
        tokenizer = load_tokenizer(model_name_or_path, loaded.model.config.vocab_size)
        text = data.split(data.documents(dataset_name, "train"), block_size, tokenizer)
        rows = per_device_train_batch_size * zero.mesh.size
        batches = data.Batches(text.train, rows, block_size, own=zerojax.process_rows(rows))
        fused = planned_attention(zero, "auto")
        model = loaded.model.clone(attention=fused) if fused else loaded.model
        work = workload(model, method, zero, rows, block_size)
        state = started(loaded, work, zero)
        console.print(repr(zero.plan(state)), markup=False)
        step = zero(work.train_step)
        for done in range(1, max_train_steps + 1):
            state, metrics = step(state, batches.batch_at(done))
            if done % max(1, max_train_steps // 10) == 0:
                console.print(f"step {done}  loss {metrics['loss']:.3f}")
        save(loaded, state, output_dir)
        console.print(f"Wrote {output_dir}")


if __name__ == "__main__":
    app()
