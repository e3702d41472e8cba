"""Typical mistakes of a newcomer: each message says what to write, in at most 400 characters.

The tables at the top of docs/errors/ have a row for each.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file
from typer.testing import CliRunner

import zerojax
from zerojax.__main__ import app
from zerojax.checkpoint import Checkpointer
from zerojax.weights import Tensor, load

pytestmark = pytest.mark.usefixtures("quick_compile")

PAGES = sorted((Path(__file__).parents[1] / "docs/errors").glob("*.md"))
LINES = [line for page in PAGES for line in page.read_text().splitlines()]
LONGEST = 400


class Mistake(NamedTuple):
    """A mistake.

    Attributes:
      wrote: The first cell of the page: a Python expression of the names in `NAMES`, a command
        line, or, with `run`, a description.
      remedy: The part of the message that says what to write.
      run: Makes the mistake, in an empty folder.
    """

    wrote: str
    remedy: str
    run: Callable[[], object] | None = None


zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
batch = {"x": np.ones((16, 8), np.float32)}


def create_state(key: Any = None, width: int = 4, tx: Any = None) -> TrainState:
    params = {"w": jnp.ones((8, width)), "b": jnp.zeros(width)}
    return TrainState.create(apply_fn=None, params=params, tx=tx or optax.sgd(0.1, momentum=0.9))


def create_with_key(key: Any) -> TrainState:
    return create_state(key)


def loss_fn(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch["x"] @ params["w"] + params["b"]) ** 2)


def step(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    loss, grads = jax.value_and_grad(loss_fn)(state.params, batch)
    return state.apply_gradients(grads=grads), loss


train_step = zero(step)


def returns_loss(state: TrainState, batch: Any) -> jax.Array:
    return step(state, batch)[1]


def returns_nothing(state: TrainState, batch: Any) -> None:
    step(state, batch)


def never_updates(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    return state, loss_fn(state.params, batch)


def with_pmean(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    grads = jax.lax.pmean(jax.grad(loss_fn)(state.params, batch), "batch")
    return state.apply_gradients(grads=grads), loss_fn(state.params, batch)


def other_shape(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    state, loss = step(state, batch)
    return state.replace(params=state.params | {"b": jnp.zeros(3)}), loss


def with_median(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
    return step(state, batch)[0], jnp.argmax(batch["x"][:, 0])


def of_two_arrays(state: TrainState, x: Any, y: Any) -> tuple[TrainState, jax.Array]:
    return step(state, {"x": x - y})


def with_options(state: TrainState, batch: Any, options: Any) -> tuple[TrainState, jax.Array]:
    return step(state, batch)


def wrapped_twice() -> object:
    zero = zerojax.zero({"optimizer": {"type": "AdamW"}})
    return zero.init(lambda: create_state(tx=optax.chain(zero.optimizer(), optax.clip(1.0))))


def own_optimizer() -> object:
    tx, params = optax.adam(1e-3), create_state().params

    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        grads = jax.grad(loss_fn)(params, batch)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    return zerojax.zero(stage=1, bf16=True)(update)(params, tx.init(params), batch)


def wrapped_without_the_config() -> object:
    tx = zerojax.wrap(optax.adamw(1e-3))
    zero = zerojax.zero(bf16=True, bf16_optimizer_states=True)
    return zero.init(lambda: create_state(tx=tx))


def passed_twice() -> None:
    state = zero.init(create_state)
    train_step(state, batch)
    train_step(state, batch)


def evaluated_too_late() -> None:
    state = zero.init(create_state)
    train_step(state, batch)
    zero.evaluate(loss_of_state)(state, batch)


def loss_of_state(state: TrainState, batch: Any) -> jax.Array:
    return loss_fn(state.params, batch)


def always_nan() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 0, "hysteresis": 1}
    zero = zerojax.zero({"fp16": fp16, "optimizer": {"type": "AdamW"}})

    @zero
    def train_step(state: TrainState, batch: Any) -> TrainState:
        grads = zerojax.grad(loss_fn)(state.params, batch)
        return state.apply_gradients(grads=grads)

    state = zero.init(lambda: create_state(tx=zero.optimizer()))
    for _ in range(4):
        state = train_step(state, {"x": np.full((16, 8), np.nan, np.float32)})


def restored(abstract_state: Any, step: int | None = None) -> object:
    with Checkpointer("run", zero) as checkpointer:
        checkpointer.save(100, zero.init(create_state))
        return checkpointer.restore(abstract_state, step)


def restored_without_frozen() -> object:
    with Checkpointer("run", zero) as checkpointer:
        checkpointer.save(100, zero.init(create_state), frozen=lambda name: name == "params.w")
        return checkpointer.restore(abstract_state())


def abstract_state(**options: Any) -> TrainState:
    return zero.abstract_state(lambda: create_state(**options))


def checkpointer() -> Checkpointer:
    return Checkpointer("run", zero)


def loaded(names: Any, like: Any = None, **tensors: np.ndarray) -> object:
    w, b = np.ones((8, 4), np.float32), np.zeros(4, np.float32)
    save_file({"weight": w, "bias": b} | tensors, "model.safetensors")
    return load("model.safetensors", like=like or create_state().params, names=names)


def without_bias() -> object:
    save_file({"weight": np.ones((8, 4), np.float32)}, "model.safetensors")
    return load("model.safetensors", like=create_state().params, names=NAMED)


def trainer(**arguments: Any) -> object:
    args = zerojax.TrainingArguments("out", report_to="none", eval_strategy="epoch")
    rows = [{"x": np.ones(8, np.float32)}] * 8
    return zerojax.Trainer(model=lambda rngs: rngs, args=args, train_dataset=rows, **arguments)


NAMED = {"w": "weight", "b": "bias"}
MISTAKES = [
    # The config.
    Mistake('zerojax.zero({"zero_optimisation": {"stage": 3}})', "`zero_optimization`"),
    Mistake(
        'zerojax.zero({"zero_optimization": {"stage": 3, "offload_optimiser": {}}})',
        "`zero_optimization.offload_optimizer`",
    ),
    Mistake("zerojax.zero(stage=3, bf_16=True)", "`bf16`"),
    Mistake('zerojax.zero(stage=3, precision="bf16")', "help(zerojax.ZeroConfig)"),
    Mistake("zerojax.zero(stage=4)", "0, 1, 2 or 3"),
    Mistake('zerojax.zero({"bf16": True})', '{"enabled": true}'),
    Mistake(
        'zerojax.zero({"zero_optimization": {"stage": 3, "offload_param": "cpu"}})',
        '{"device": "cpu"}',
    ),
    Mistake("zerojax.zero(stage=1, bf16=True, fp16=True)", "set fp16 or bf16 to false"),
    Mistake(
        'zerojax.zero({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, '
        '"gradient_accumulation_steps": 2})',
        "gradient_accumulation_steps 1",
    ),
    Mistake('zerojax.zero({"optimizer": {"type": "AdamX"}})', '"Adam"'),
    Mistake('zerojax.zero({"optimizer": {"type": "AdamW", "lr": 1e-3}})', "`optimizer.params.lr`"),
    Mistake("zerojax.zero(stage=3, optimizer=optax.adam(1e-3))", "TrainState.create(tx=...)"),
    Mistake(
        'zerojax.zero({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}})',
        "a finite number of at least 0",
    ),
    Mistake(
        'zerojax.zero({"optimizer": {"type": "AdamW"}, "scheduler": '
        '{"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}})',
        'auto={"scheduler.params.total_num_steps": ...}',
    ),
    Mistake(
        'zerojax.zero(bf16=True, bf16_optimizer_states=True, optimizer={"type": "Lion"})',
        "name one of these",
    ),
    Mistake("zerojax.zero(stage=0, offload_optimizer='cpu')", "set stage to 1"),
    Mistake(
        'zerojax.zero(stage=3, offload_optimizer={"device": "nvme"})',
        '"/local_nvme"',
    ),
    Mistake("zerojax.zero(stage=3, fp8=True)", "set bf16 to true"),
    Mistake("zerojax.zero(stage=2, bf16=True, fp8=True)", "set stage to 3"),
    Mistake("zerojax.zero(stage=3, bf16=True, fp8=True, zero_hpz_partition_size=4)", "set it to 1"),
    Mistake("zerojax.zero(stage=3, bf16=True, fp8=True).init(create_state)", 'fp8="emulate"'),
    Mistake(
        'zerojax.zero(stage=3, bf16=True, fp8="emulate").init(create_state)', "Lower fp8.min_size"
    ),
    Mistake('zerojax.zero("ds_config.json")', "check the path"),
    Mistake("zerojax.zero(step)", "@zerojax.zero(stage=3)"),
    Mistake(
        "zerojax.zero(stage=3).optimizer()",
        '{"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}',
    ),
    # Devices and meshes.
    Mistake("zerojax.mesh(16)", "jax.config.update('jax_num_cpu_devices', N)"),
    Mistake('zerojax.mesh("data=8")', 'axes="data=4,model=2"'),
    Mistake('zerojax.mesh(axes=("data", "model"))', '{"data": 4, "model": 2}'),
    Mistake('zerojax.mesh(axes="data=4,model=4")', "change a size"),
    Mistake("zerojax.zero(stage=3, mesh=jax.devices())", "mesh=zerojax.mesh(8)"),
    Mistake(
        'zerojax.zero(stage=3, mesh=jax.make_mesh((4, 2), ("fsdp", "tensor")))',
        "Rename the data-parallel axis to 'data'",
    ),
    Mistake('zerojax.topology("h1000", 8)', "'h100'"),
    Mistake(
        'zerojax.zero(stage=3, specs={"weight": PartitionSpec()}).init(create_state)',
        "an entry for each parameter",
    ),
    # The state.
    Mistake("zero.init(create_state())", "zero.init(create_state, key)"),
    Mistake("zero.init(create_with_key)", "zero.init(create_with_key, key)"),
    Mistake("zero.init(lambda: None)", "Return a TrainState"),
    Mistake("a state passed to two steps", "the state that the step returned", passed_twice),
    Mistake("train_step(jax_utils.replicate(create_state()), batch)", "unreplicate(state)"),
    Mistake(
        "train_step(zerojax.zero(stage=3, mesh=zerojax.mesh(4)).init(create_state), batch)",
        "Create the state with this zero.init",
    ),
    Mistake(
        "train_step(create_state().replace(params={}), batch)", "the params of model.init(...)"
    ),
    Mistake(
        "a chain around `zero.optimizer()`", "Wrap only the outermost transformation", wrapped_twice
    ),
    Mistake("an optimizer of your own with bf16", "zero.wrap(tx)", own_optimizer),
    Mistake(
        "zerojax.zero(bf16=True, bf16_optimizer_states=True).init(create_state)", "optax.adamw"
    ),
    Mistake(
        "`bf16_optimizer_states`, and the optimizer is of `zerojax.wrap`",
        "zero.wrap() of this zero",
        wrapped_without_the_config,
    ),
    # The step.
    Mistake("zero(returns_loss)(create_state(), batch)", "Return the new state"),
    Mistake("zero(returns_nothing)(create_state(), batch)", "Return the new state"),
    Mistake("zero(never_updates)(create_state(), batch)", "state.apply_gradients"),
    Mistake("zero(other_shape)(create_state(), batch)", "shapes that the step returns"),
    Mistake("zero(with_pmean)(create_state(), batch)", "Remove it"),
    Mistake("zero(jax.pmap(step))(create_state(), batch)", "Remove it"),
    Mistake("jax.jit(train_step)(create_state(), batch)", "Call it in a plain Python loop"),
    Mistake("train_step(create_state())", "'batch'"),
    Mistake(
        'zero(with_options, static_argnums=2)(create_state(), batch, {"a": 1})',
        "a frozen dataclass",
    ),
    Mistake(
        "zerojax.zero(stage=1, fp16=True)(step)"
        "(zerojax.zero(stage=1, fp16=True).init(create_state), batch)",
        "zerojax.value_and_grad",
    ),
    Mistake("a loss that stays NaN under fp16", "lower the learning rate", always_nan),
    # The batch.
    Mistake('train_step(create_state(), {"x": np.ones((12, 8))})', "Use 8 or 16 rows"),
    Mistake(
        "zerojax.zero(stage=1, gradient_accumulation_steps=4)(step)(create_state(), batch)",
        "Use 32 rows",
    ),
    Mistake(
        "zerojax.zero(stage=1, train_batch_size=32)(step)(create_state(), batch)",
        "Pass the global batch",
    ),
    Mistake("train_step(create_state(), {})", "batch_argnums"),
    Mistake(
        'train_step(create_state(), {**batch, "text": np.array(["a"] * 16)})',
        "Remove it from the batch",
    ),
    Mistake("train_step(create_state(), [1.0] * 16)", "np.asarray(numbers)"),
    Mistake(
        "zerojax.zero(stage=1, gradient_accumulation_steps=2)(of_two_arrays)"
        '(create_state(), batch["x"], batch["x"])',
        "batch_argnums=(1, 2)",
    ),
    Mistake(
        "zerojax.zero(stage=1, gradient_accumulation_steps=2)(with_median)(create_state(), batch)",
        "set gradient_accumulation_steps to 1",
    ),
    # Evaluation.
    Mistake("zero.evaluate(step)(create_state(), batch)", "a step that trains with @zero"),
    Mistake("a state evaluated after the step took it", "the step returned", evaluated_too_late),
    Mistake(
        "jax.jit(zero.evaluate(loss_of_state))(create_state(), batch)", "in a plain Python loop"
    ),
    # Checkpoints.
    Mistake("checkpointer().save(create_state(), 100)", "save(step, state)"),
    Mistake(
        "`checkpointer.restore(create_state)`",
        "zero.abstract_state(create_state, key)",
        lambda: restored(create_state),
    ),
    Mistake("checkpointer().restore(zero.abstract_state(create_state))", "save first"),
    Mistake('Checkpointer("s3://bucket/run", zero)', "Pass a folder"),
    Mistake(
        "a checkpoint of another width",
        "the model and the optimizer that were saved",
        lambda: restored(abstract_state(width=6)),
    ),
    Mistake(
        "a checkpoint of another optimizer",
        "restore(abstract_state.params)",
        lambda: restored(abstract_state(tx=optax.adam(0.1))),
    ),
    Mistake("a step that was not saved", "it has 100", lambda: restored(abstract_state(), 7)),
    Mistake(
        "a frozen array that was left out", "replace(base=state.base)", restored_without_frozen
    ),
    # Weights.
    Mistake('load("none.safetensors", like=create_state().params)', "pass a safetensors file"),
    Mistake('load(".", like=create_state().params)', "save_pretrained"),
    Mistake("a file without the bias", "names={parameter: tensor}", without_bias),
    Mistake("a transposed tensor", '"o i -> i o"', lambda: loaded(NAMED, weight=np.ones((4, 8)))),
    Mistake(
        "a LoRA parameter that the file lacks",
        "the name of a tensor or None",
        lambda: loaded(NAMED, create_state().params | {"lora": jnp.ones((8, 2))}),
    ),
    Mistake(
        "an arrangement with commas",
        '"o i -> i o"',
        lambda: loaded(NAMED | {"w": Tensor("weight", "o,i -> i,o")}),
    ),
    # Offload.
    Mistake(
        'zerojax.zero(stage=3, offload_optimizer={"device": "nvme", "nvme_path": "/none/disk"})'
        ".init(create_state)",
        "make the folder",
    ),
    Mistake('zerojax.remat_policy("offload")', "'offload:a,b'"),
    # The Trainer.
    Mistake(
        'zerojax.TrainingArguments("out", learn_rate=0.1)',
        "`learning_rate`",
    ),
    Mistake("`eval_strategy` without an evaluation set", "pass an eval_dataset", trainer),
    # Commands.
    Mistake("zerojax plann", "'plan'"),
    Mistake("zerojax plan --model gpt2-lage --devices h100:8 --config ds.json", "'gpt2-large'"),
    Mistake("zerojax plan --model gpt2 --devices h200x:8 --config ds.json", "'h200'"),
    Mistake("zerojax plan --model gpt2 --devices h100:12 --config ds.json", "take 8 or 16"),
    Mistake("zerojax plan --model gpt2 --devices h100:8 --config none.json", "check the path"),
    Mistake("zerojax inspect nowhere", "check the path"),
    Mistake("zerojax launch trian.py", "check the path"),
    Mistake("zerojax launch --nproc-per-node eight train.py", "expected 8"),
    Mistake("zerojax launch --hostfile hosts --include worker-7 train.py", "worker-0, worker-1"),
    Mistake("zerojax launch --hostfile hosts --nproc-per-node 3 train.py", "lower it"),
    Mistake("zerojax launch --hostfile ds.json train.py", "`HOST slots=N`"),
    Mistake("zerojax launch --num-nodes 2 train.py", "--node-rank and --coordinator"),
]


NAMES = {**globals(), "jax_utils": jax_utils, "PartitionSpec": PartitionSpec}
"""The names in the expressions."""


def message(mistake: Mistake) -> str:
    """Returns the message of a mistake on one line, without the folder and the line of a file."""
    if mistake.run is None and mistake.wrote.startswith("zerojax "):
        result = CliRunner().invoke(app, shlex.split(mistake.wrote)[1:], obj={"PATH": ""})
        assert result.exit_code == 2
        text = result.stderr.rpartition("Error: ")[2]
    else:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            eval(mistake.wrote, NAMES) if mistake.run is None else mistake.run()
        text = str(caught.value).partition(" jax says:")[0]
    text = text.replace(f"{Path.cwd()}/", "").replace(f"{Path.cwd()}", "FOLDER").strip()
    text = re.sub(r"\n\s*", " / ", text)
    return re.sub(r"(\w+\.py):\d+", r"\1", text)


def code(text: str) -> str:
    """Returns a text as Markdown's code."""
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def row(mistake: Mistake, text: str) -> str:
    """Returns the row of the page for a mistake."""
    wrote = code(mistake.wrote) if mistake.run is None else mistake.wrote
    return f"| {wrote} | {code(text)} | {code(mistake.remedy)} |"


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.wrote[:40])
def test_the_message_says_what_to_write(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    Path("hosts").write_text("worker-0 slots=2\nworker-1 slots=4\n")
    Path("train.py").touch()
    text = message(mistake)
    assert mistake.remedy in text
    assert len(text) <= LONGEST
    assert row(mistake, text) in LINES


def test_the_pages_have_no_other_rows() -> None:
    rows = [line for line in LINES if line.startswith("| ") and line[2:5] != "---"]
    heads = [row for row in rows if row.startswith("| you wrote |")]
    assert len(rows) - len(heads) == len(MISTAKES) >= 45
