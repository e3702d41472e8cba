"""GPT-2 weights of Hugging Face: loaded shard by shard, saved file by file, refused where wrong."""

import dataclasses
import gc
import json
import pathlib
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from checkpoint import recorded
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import zerojax
from tests.models.by_name import stacked
from zerojax.checkpoint.exporter import export
from zerojax.models.gpt import GPT, GPTConfig
from zerojax.models.hugging_face.folder import by_path
from zerojax.models.hugging_face.gpt2 import (
    config_from_hf,
    config_to_hf,
    export_names,
    load,
    read_config,
    save,
)

TINY = GPTConfig(vocab_size=96, block_size=32, n_layer=3, n_head=2, n_embd=16)
SCANNED = dataclasses.replace(TINY, scan=True)
MODELS = pytest.mark.parametrize("config", [TINY, SCANNED], ids=["unrolled", "scanned"])
PEERS = pathlib.Path(__file__).parents[1] / "data" / "peers"

pytestmark = pytest.mark.usefixtures("quick_compile")

Arrays = dict[str, np.ndarray]


def init(config: GPTConfig, seed: int = 0) -> Any:
    """Parameters drawn at random, biases and norms too, so that no two are equal."""
    shapes = jax.eval_shape(create_state_of(config), jax.random.key(0)).params
    leaves, tree = jax.tree.flatten(shapes)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(
        tree, [jnp.asarray(rng.normal(0, 0.02, x.shape), x.dtype) for x in leaves]
    )


def create_state_of(config: GPTConfig) -> Callable[[jax.Array], TrainState]:
    def create_state(key: jax.Array) -> TrainState:
        params = GPT(config).init(key, jnp.zeros((1, 8), jnp.int32))["params"]
        return TrainState.create(apply_fn=GPT(config).apply, params=params, tx=optax.adam(1e-3))

    return create_state


def assert_same(found: Any, expected: Any, **tolerance: float) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance or {"rtol": 0}),
                 found, expected)  # fmt: skip


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A saved TINY of seed 0, scanned or not: the same file."""
    save(init(TINY), TINY, tmp_path / "model")
    return tmp_path / "model"


def checkpoint(folder: pathlib.Path, params: Any, config: GPTConfig) -> None:
    """Step 1 with these parameters, sharded by columns."""
    cut = NamedSharding(zerojax.mesh(), PartitionSpec(None, "data"))
    params = jax.tree.map(lambda x: jax.device_put(x, cut) if x.ndim == 2 else x, params)
    about = {name: value for name, value in vars(config).items() if name != "dtype"}
    recorded.save(folder, 1, {"params": params}, extra={"model": about})


def rewrite(folder: pathlib.Path, change: Callable[[Arrays], Any]) -> pathlib.Path:
    """The folder's weights after a change; returns the file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


# Names and values


@pytest.mark.parametrize(("scan", "stage"), [(False, 0), (True, 3)])
def test_logits_equal_hugging_faces(scan: bool, stage: int) -> None:
    hf = config_from_hf(json.loads((PEERS / "gpt2_tiny_config.json").read_text()))
    config = dataclasses.replace(hf, scan=scan)
    zero = zerojax.zero(stage=stage, stage3_param_persistence_threshold=0)
    like = zero.abstract_state(create_state_of(config), jax.random.key(0)).params
    params = load(PEERS / "gpt2_tiny.safetensors", config, like=like)
    expected = np.load(PEERS / "logits_step0.npy")
    tokens = np.load(PEERS / "tokens.npy")[0, : len(expected)]
    logits = jax.jit(GPT(config).apply)({"params": params}, tokens)
    np.testing.assert_allclose(logits, expected, atol=2e-4, rtol=0)


@MODELS
def test_what_was_saved_is_loaded(config: GPTConfig, folder: pathlib.Path) -> None:
    expected = stacked(init(TINY)) if config.scan else init(TINY)
    assert_same(load(folder, config), expected)
    save(load(folder, config), config, folder.parent / "again", max_shard_size=20_000)
    assert_same(load(folder.parent / "again", config), expected)


def test_no_prefix_and_buffers_and_a_tied_head_are_known(folder: pathlib.Path) -> None:
    def change(tensors: Arrays) -> None:
        named = {name.removeprefix("transformer."): value for name, value in tensors.items()}
        tensors.clear()
        tensors |= named | {"lm_head.weight": named["wte.weight"]}
        tensors["h.1.attn.bias"] = np.ones((1, 1, 32, 32), np.uint8)
        tensors["h.1.attn.masked_bias"] = np.array(-1e4, np.float32)

    file = rewrite(folder, change)
    assert_same(load(file, TINY), init(TINY))
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].__iadd__(1))
    with pytest.raises(ValueError, match=r"lm_head.weight \[96, 16\] differs from .*wte.weight"):
        load(folder, TINY)


# What is read and held


@pytest.mark.slow
def test_saving_holds_one_tensor_at_a_time(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(TINY, n_embd=256, n_layer=8)
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    like = zero.abstract_state(create_state_of(config), jax.random.key(0)).params
    params = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), init(config), like)
    limit = 4_000_000
    assert sum(x.nbytes for x in jax.tree.leaves(params)) > 6 * limit
    save(params, config, tmp_path, max_shard_size=limit)
    taken = host_bytes(lambda: save(params, config, tmp_path, max_shard_size=limit))
    largest = 4 * 256 * 1024
    assert taken < 1.75 * largest < limit / 2  # not two, and not a file


def host_bytes(run: Callable[[], Any]) -> int:
    """Python's and NumPy's memory that a call took at the most.

    The least of three calls: other threads of this process, such as those that write compiled
    programs to the cache, are counted too.
    """
    return min(_host_bytes(run) for _ in range(3))


def _host_bytes(run: Callable[[], Any]) -> int:
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        jax.block_until_ready(run())
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


# Files


def test_parameters_of_another_model_are_not_saved(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"only the tree given has the parameter h/.*scan"):
        save(init(SCANNED), TINY, tmp_path / "new")
    wider = dataclasses.replace(TINY, vocab_size=100)
    with pytest.raises(ValueError, match=r"wte/embedding is \[100, 16\] .* \[96, 16\] in GPT"):
        save(init(wider), TINY, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# Of a checkpoint


def test_a_checkpoint_is_exported_as_it_would_be_saved(tmp_path: pathlib.Path) -> None:
    params, config = init(TINY), TINY
    checkpoint(tmp_path / "in", params, config)
    export(tmp_path / "in", tmp_path / "out", max_shard_size=20_000, names=export_names)
    save(params, config, tmp_path / "saved", max_shard_size=20_000)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()
    }
    assert read_config(tmp_path / "out") == TINY
    assert_same(load(tmp_path / "out", config), params)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["a"], "model'] is None, and needs vocab_size, block_size, n_layer, n_head, n_embd of"),
        ({"model": {"n_layer": 3}}, r"\['model'\] is {'n_layer': 3}, and needs vocab_size"),
        ({"model": vars(TINY) | {"n_layer": 2}}, "only the tree given has the parameter h_2"),
        ({"model": vars(TINY) | {"block_size": 8}}, r"wpe/embedding is \[32, 16\] in the tree"),
        ({"model": vars(TINY) | {"n_head": 3}}, "n_embd must be a multiple of n_head = 3"),
    ],
)
def test_a_checkpoint_must_say_what_model_it_is(extra: Any, message: str) -> None:
    leaves = {name.replace("/", "."): x.shape for name, x in by_path(init(TINY)).items()}
    with pytest.raises(ValueError, match=message):
        export_names(leaves, extra)


# Bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 16}, r"config.json: n_positions = 32, but the model has block_size = 16"),
        ({"n_head": 4}, "n_head = 2, but the model has n_head = 4"),  # no shape shows it
    ],
)
def test_a_model_of_another_size_is_refused(
    folder: pathlib.Path, change: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder, dataclasses.replace(TINY, **change))


def test_what_like_and_dtype_must_be(folder: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="only the tree given has the parameter h/"):
        load(folder, TINY, like=init(SCANNED))
    with pytest.raises(ValueError, match="int32: save floats, the only dtypes that are cast"):
        load(folder, TINY, dtype=jnp.int32)


# config.json


def test_config_there_and_back() -> None:
    gpt2 = config_from_hf({"model_type": "gpt2", "n_ctx": 1024, "use_cache": True})
    assert gpt2 == GPTConfig(
        vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768, dropout=0.1
    )
    assert config_from_hf(json.loads(json.dumps(config_to_hf(gpt2)))) == gpt2
    assert config_to_hf(gpt2)["eos_token_id"] == 50256
    assert config_to_hf(TINY)["eos_token_id"] is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"activation_function": "relu"}, "activation_function = 'relu' is not supported: .*gelu"),
        ({"n_inner": 100}, "n_inner = 100 is not supported: .* None or 3072"),
        ({"attn_pdrop": 0.2}, "one dropout rate"),
        ({"n_head": 7}, "must be a multiple of n_head = 7"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(
    values: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"config.json: .*{message}"):
        read_config(tmp_path)
