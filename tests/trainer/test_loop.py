"""The Trainer's numbers beside those of plain jax and optax, evaluations, checkpoints, errors."""

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainer.jobs import CONFIG, POINTS, TOKENS, Classifier, digest, dropout_job

import zerojax
from zerojax import Trainer, TrainingArguments
from zerojax.checkpoint import PREEMPTED, CheckpointError
from zerojax.models.gpt import GPT
from zerojax.models.hugging_face.gpt2 import export_names, load
from zerojax.models.tensor_parallel import TensorParallel
from zerojax.optim.decay import no_bias_and_norm
from zerojax.trainer import (
    EarlyStoppingCallback,
    TrainerCallback,
    causal_lm_loss,
    classification_loss,
)

pytestmark = pytest.mark.usefixtures("quick_compile")
STEPS, WARMUP = 7, 3
plain_logits = jax.jit(GPT(CONFIG).apply)


def logged(trainer: Trainer, name: str) -> list[float]:
    return [log[name] for log in trainer.state.log_history if name in log]


@pytest.fixture(scope="module")
def plain_losses(quick_compile: None) -> list[float]:
    """Of 7 updates of 16 rows by jax and optax alone: AdamW, linear schedule, clipping."""
    args = TrainingArguments("out", per_device_train_batch_size=2, num_train_epochs=1.4)
    rows = zerojax.trainer.data.Epochs.of(TOKENS, args, 8)
    keys = dict(zip(("params", "dropout"), jax.random.split(jax.random.key(42)), strict=True))
    model = GPT(CONFIG)
    params = jax.jit(model.init)(keys, jnp.zeros((1, 12), jnp.int32))["params"]

    def rate(t: jax.Array) -> jax.Array:
        return 1e-2 * jnp.where(t < WARMUP, t / WARMUP, (STEPS - t) / (STEPS - WARMUP))

    adamw = optax.adamw(rate, weight_decay=0.1, mask=no_bias_and_norm)
    tx = optax.chain(optax.clip_by_global_norm(0.5), adamw)

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        def loss_fn(params: Any) -> jax.Array:
            logits, labels = model.apply({"params": params}, tokens)[:, :-1], tokens[:, 1:]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = tx.init(params), []
    for i in range(STEPS):
        tokens = np.stack([TOKENS[j]["input_ids"] for j in rows.indices(i)])
        params, state, loss = step(params, state, tokens)
        losses.append(float(loss))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"fsdp": "full_shard", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2},
    ],
    ids=["stage 0", "stage 3, 2 micro-batches"],
)
def test_losses_are_those_of_a_plain_loop(
    more: dict[str, Any], plain_losses: list[float], tmp_path: Path
) -> None:
    arguments = dict(
        learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, per_device_train_batch_size=2,
        num_train_epochs=1.4, warmup_ratio=0.4, logging_steps=1, save_strategy="no",
    ) | more  # fmt: skip
    args = TrainingArguments(str(tmp_path), **arguments)
    trainer = Trainer(GPT(CONFIG), args, train_dataset=TOKENS, loss=causal_lm_loss)
    out = trainer.train()
    np.testing.assert_allclose(logged(trainer, "loss"), plain_losses, rtol=2e-6)
    assert out.global_step == STEPS
    assert out.training_loss == pytest.approx(np.mean(plain_losses))
    rates = logged(trainer, "learning_rate")
    np.testing.assert_allclose(rates[:4], [0, 1e-2 / 3, 2e-2 / 3, 1e-2], rtol=1e-6)
    if not more:
        rows, expected, written = check_evaluation(trainer)
        args = TrainingArguments(str(tmp_path / "loaded"), fsdp="full_shard")
        loaded = Trainer(
            GPT(CONFIG), args, eval_dataset=rows, loss=causal_lm_loss,
            params=lambda like: load(written, CONFIG, like=like),
        )  # fmt: skip
        assert loaded.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_a_mesh_axis_cuts_the_model(tmp_path: Path) -> None:
    tensor = TensorParallel(zerojax.mesh(axes="data=4,model=2"))
    trainer = Trainer(
        GPT(CONFIG, tensor=tensor), TrainingArguments(str(tmp_path), fsdp="full_shard"),
        train_dataset=TOKENS, loss=causal_lm_loss, mesh=tensor.mesh, specs=tensor.specs,
    )  # fmt: skip
    assert trainer.evaluate(TOKENS[:8])["eval_loss"] == pytest.approx(math.log(64), abs=0.1)
    params: Any = trainer.train_state.params
    assert params["h_0"]["mlp"]["c_fc"]["kernel"].sharding.spec[-1] == "model"


def check_evaluation(trainer: Trainer) -> tuple[list[dict[str, Any]], float, Path]:
    """The loss over 21 rows, whose tokens count unequally, is that of all tokens at once; the
    weights are in transformers' folder. Returns the rows, that loss, and the folder."""
    rng = np.random.default_rng(1)
    rows = []
    for row in TOKENS[:21]:
        counts = np.arange(12) < rng.integers(2, 13)
        rows.append({**row, "labels": np.where(counts, row["input_ids"], -100)})
    params = jax.device_get(trainer.train_state.params)
    tokens, labels = (np.stack([row[k] for row in rows]) for k in ("input_ids", "labels"))
    logits = plain_logits({"params": params}, tokens)[:, :-1]
    mask = labels[:, 1:] >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    expected = float((losses * mask).sum() / mask.sum())
    output = trainer.predict(rows)
    assert output.metrics["test_loss"] == pytest.approx(expected, rel=1e-6)
    assert output.predictions.shape == (21, 12, 64)
    np.testing.assert_array_equal(output.label_ids, labels)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, rel=1e-6)
    written = trainer.save_model(names=export_names)
    assert (written / "config.json").exists()
    jax.tree.map(np.testing.assert_array_equal, params, load(written, CONFIG))
    return rows, expected, written


def test_a_killed_run_goes_on_bit_for_bit(
    tmp_path: Path, quick_processes: None, compiled_in: dict[str, str]
) -> None:
    reference = dropout_job(str(tmp_path / "whole"))
    reference.train()
    killed, script = str(tmp_path / "killed"), Path(__file__).with_name("jobs.py")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(Path(__file__).parents[n]) for n in (2, 1)),
        **compiled_in,
    }
    done = subprocess.run([sys.executable, script, killed], env=environment, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()[-2000:]
    resumed = dropout_job(killed)
    resumed.train(resume_from_checkpoint=True)
    assert digest(resumed) == digest(reference)
    assert resumed.state.log_history[-2]["step"] == 9
    assert logged(resumed, "loss") == logged(reference, "loss")


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(
        str(folder),
        **dict(learning_rate=0.05, per_device_train_batch_size=2, eval_strategy="epoch",
               save_strategy="epoch", deepspeed={"zero_optimization": {"stage": 1}}) | more,
    )  # fmt: skip


def accuracy(given: Any) -> dict[str, float]:
    return {"accuracy": float((given.predictions == given.label_ids).mean())}


def classifier(args: TrainingArguments, **more: Any) -> Trainer:
    given: dict[str, Any] = dict(
        train_dataset=POINTS, eval_dataset=POINTS[:21], loss=classification_loss,
        compute_metrics=accuracy,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    ) | more  # fmt: skip
    return Trainer(given.pop("model", Classifier()), args, **given)


class Events(TrainerCallback):
    """Counts; asks for the end after 20 updates."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        self.seen["epochs"] = self.seen.get("epochs", 0) + 1

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 20

    def on_save(self, *args: Any, **kwargs: Any) -> None:
        self.seen["saves"] = self.seen.get("saves", 0) + 1


@pytest.mark.slow
def test_the_best_model_metrics_callbacks_and_weights(tmp_path: Path) -> None:
    events = Events()
    args = arguments(
        tmp_path, num_train_epochs=8, load_best_model_at_end=True, save_total_limit=2,
        report_to="csv",
    )  # fmt: skip
    trainer = classifier(args, callbacks=[events, EarlyStoppingCallback(10)])
    assert trainer.train().global_step == 20
    assert events.seen == {"epochs": 4, "saves": 4}
    scores = logged(trainer, "eval_accuracy")
    assert len(scores) == 4
    losses = logged(trainer, "eval_loss")
    assert trainer.state.best_metric == min(losses)
    kept = {int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdecimal()}
    assert kept == {trainer.state.best_global_step, 20}
    assert trainer.evaluate()["eval_loss"] == min(losses)
    # Dropout is off in evaluations: as the dense layer alone.
    dense = jax.device_get(trainer.train_state.params["Dense_0"])
    x = np.stack([row["x"] for row in POINTS[:21]])
    output = trainer.predict([{"x": row} for row in x])  # without labels
    np.testing.assert_array_equal(
        output.predictions, (x @ dense["kernel"] + dense["bias"]).argmax(-1)
    )
    assert output.label_ids is None
    assert "test_loss" not in output.metrics
    csv = (tmp_path / "runs/trainer/Eval_Samples_eval_accuracy.csv").read_text().split()
    assert csv[:2] == ["step,eval_accuracy", f"80,{scores[0]}"]
    from safetensors.numpy import load_file

    weights = load_file(trainer.save_model() / "model.safetensors")
    np.testing.assert_array_equal(weights["Dense_0.kernel"], dense["kernel"])
    # A new run refuses the folder; one that starts from the parameters has them.
    with pytest.raises(CheckpointError, match="resume_from_checkpoint=True"):
        classifier(args).train()
    given = trainer.train_state.params
    begun = classifier(arguments(tmp_path / "b", max_steps=1), params=given)
    assert begun.evaluate()["eval_loss"] == min(losses)
    assert begun.train().global_step == 1
    np.testing.assert_array_equal(given["Dense_0"]["kernel"], dense["kernel"])  # still there
    wrong = classifier(args, params=lambda like: {"Dense_0": {"kernel": np.zeros((8, 4))}})
    with pytest.raises(ValueError, match=r"\['bias'\] is None where the model has \(4,\)"):
        wrong.evaluate()


class NnxClassifier(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dense(self.dropout(x))


@pytest.mark.slow
@pytest.mark.parametrize("made", [True, False], ids=["function", "module"])
def test_nnx_and_a_path_to_go_on_from(made: bool, tmp_path: Path) -> None:
    own = NnxClassifier(rngs=nnx.Rngs(42))

    def job(folder: str, **more: Any) -> Trainer:
        model = NnxClassifier if made else own
        more = dict(num_train_epochs=2, save_total_limit=None) | more
        return classifier(arguments(tmp_path / folder, **more), model=model)

    trainer = job("a")
    trainer.train()
    model = trainer.train_state[0]
    x, y = (np.stack([row[k] for row in POINTS[:21]]) for k in ("x", "label"))
    logits = x @ np.asarray(model.dense.kernel[...]) + np.asarray(model.dense.bias[...])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(losses.mean()), rel=1e-5)
    assert own.dense.kernel[...].shape == (8, 4)  # the caller's module is as before
    assert np.isfinite(own.dense.kernel[...]).all()
    if made:
        resumed = job("b")
        resumed.train(resume_from_checkpoint=tmp_path / "a/checkpoints/5")
        assert resumed.state.global_step == 10
        kernel = resumed.train_state[0].dense.kernel[...]
        np.testing.assert_array_equal(kernel, model.dense.kernel[...])
        begun = classifier(
            arguments(tmp_path / "c"), model=NnxClassifier,
            params=lambda like: jax.tree.map(lambda x: np.zeros(x.shape), like),
        )  # fmt: skip
        assert begun.evaluate()["eval_loss"] == pytest.approx(math.log(4))


@pytest.mark.slow
def test_sigterm_saves_and_leaves(tmp_path: Path) -> None:
    class Terminate(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                signal.raise_signal(signal.SIGTERM)

    args = arguments(tmp_path / "a", num_train_epochs=1)
    with pytest.raises(SystemExit) as left:
        classifier(args, callbacks=[Terminate]).train()
    assert left.value.code == PREEMPTED
    resumed, whole = classifier(args), classifier(arguments(tmp_path / "b", num_train_epochs=1))
    assert resumed.train(resume_from_checkpoint=True).global_step == whole.train().global_step
    assert digest(resumed) == digest(whole)


def test_a_model_that_gives_its_own_loss_and_has_batch_statistics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Mock()
    wandb = Mock(run=None, init=Mock(return_value=run))
    monkeypatch.setitem(sys.modules, "wandb", wandb)

    class Normed(nn.Module):
        @nn.compact
        def __call__(
            self, x: jax.Array, labels: jax.Array | None = None, train: bool = False
        ) -> Any:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
            logits = nn.Dense(4)(x)
            if labels is None:
                return {"logits": logits}
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return {"loss": losses.mean(), "logits": logits}

    from zerojax.models.losses import model_loss

    args = arguments(tmp_path, max_steps=3, save_strategy="no", report_to="wandb")
    trainer = classifier(args, model=Normed(), loss=model_loss)
    trainer.train()
    mean = trainer.train_state.variables["batch_stats"]["BatchNorm_0"]["mean"]
    assert float(jnp.abs(mean).max()) > 0
    accuracy = trainer.evaluate()["eval_accuracy"]
    assert accuracy > 0.25
    # The evaluation is in the run of the training.
    assert run.log.call_args.args[0]["Eval/Samples/eval_accuracy"] == accuracy
    wandb.init.assert_called_once()
    run.finish.assert_not_called()


def test_bad_input_is_named_before_any_step(tmp_path: Path) -> None:
    def raises(given: Any) -> dict[str, float]:
        raise KeyError("predictions of the wrong kind")

    args = arguments(tmp_path, max_steps=2)
    trainer = classifier(args, compute_metrics=raises)
    with pytest.raises(KeyError) as raised:
        trainer.train()
    assert "Raised by compute_metrics for predictions (21,)" in raised.value.__notes__[0]
    assert trainer.state.global_step == 0
    for more, says in (
        ({"callbacks": [print]}, "is no callback"),
        ({"callbacks": [type("C", (TrainerCallback,), {"on_stepend": 1})]}, "`on_step_end`"),
        ({"train_dataset": POINTS[:5], "args": {"dataloader_drop_last": True}},
         "fewer than the 16 of a micro-batch"),
        ({"eval_dataset": None}, "pass an eval_dataset"),
        ({"model": 3}, "is no flax module"),
        ({"optimizer": optax.sgd(1.0), "args": {"deepspeed": {"optimizer": {"type": "Adam"}}}},
         "the JSON names one"),
        ({"optimizer": optax.sgd(1.0)}, "learning_rate = 0.05 has no effect"),
        ({"optimizers": (None, None)}, "optimizers: not supported; optimizer= takes"),
        ({"datacollator": len}, "did you mean `data_collator`"),
        ({"args": {"gradient_checkpointing": True}}, "the model has no field `remat`"),
    ):  # fmt: skip
        one = dict(more)
        changed = arguments(tmp_path, **one.pop("args", {}))
        with pytest.raises((TypeError, ValueError), match=says):
            classifier(changed, **one)


def test_metrics_are_held_to_the_arguments_before_any_step(tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "f1"}
    for more, says in (
        (best, '"eval_f1", and an evaluation gives eval_loss, eval_accuracy'),
        ({"label_names": ["lables"]}, "no field of eval_dataset is named lables"),
    ):
        trainer = classifier(arguments(tmp_path, max_steps=2, **more))
        with pytest.raises(ValueError, match=says):
            trainer.train()
        assert trainer.state.global_step == 0
    stop, other = EarlyStoppingCallback(), arguments(tmp_path, metric_for_best_model="f1")
    with pytest.raises(ValueError, match="name one of these"):
        stop.on_evaluate(other, None, None, metrics={"eval_loss": 1.0, "eval_runtime": 1.0})


def test_pipeline_stages_of_the_json(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=4,
        deepspeed={"pipeline": {"stages": 4}, "train_batch_size": "auto"},
    )  # fmt: skip
    trainer = classifier(args)
    assert dict(trainer.zero.mesh.shape) == {"stage": 4, "data": 2}
    assert trainer.zero.config.train_batch_size == trainer.epochs.batch == 16


def test_bad_input_is_named_in_train(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, eval_strategy="no")
    with pytest.raises(TypeError, match=r"Classifier is a class: pass a module, Classifier\(\)"):
        Trainer(Classifier, TrainingArguments(str(tmp_path)))
    with pytest.raises(TypeError, match=r"no train_dataset: pass Trainer\(train_dataset="):
        classifier(args, train_dataset=None).train()
    with pytest.raises(CheckpointError, match="has no checkpoint to resume from"):
        classifier(args).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="no loss: the model gave none"):
        classifier(args, loss=lambda model, batch: model(batch["x"])).train()
    with pytest.raises(TypeError, match="the loss is a scalar, or a pair"):
        classifier(args, loss=lambda model, batch: {"loss": model(batch["x"])}).train()
    with pytest.raises(TypeError, match=r"__call__ takes tokens, .* the batch has labels, x"):
        classifier(args, model=GPT(CONFIG)).train()
    classifier(args).train()
    with pytest.raises(CheckpointError, match=r"rows of train_dataset \(75 there, 60 here\)"):
        classifier(args, train_dataset=POINTS[:60]).train(resume_from_checkpoint=True)
    overwriting = arguments(tmp_path, max_steps=1, eval_strategy="no", overwrite_output_dir=True)
    assert math.isfinite(classifier(overwriting).train().training_loss)
