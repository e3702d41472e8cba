"""GPT-2 weights of Hugging Face: loaded shard by shard, saved file by file, refused where wrong."""

import dataclasses
import gc
import importlib.util
import json
import math
import pathlib
import shutil
import struct
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from checkpoint import recorded
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

import zerojax
from zerojax.checkpoint.exporter import export
from zerojax.models import gpt_nnx
from zerojax.models.gpt import GPT, GPTConfig, loss_fn
from zerojax.models.hugging_face.folder import by_path
from zerojax.models.hugging_face.gpt2 import (
    DROPOUTS,
    NAMES,
    config_from_hf,
    config_to_hf,
    export_names,
    load,
    read_config,
    save,
)
from zerojax.weights import saver, stacked
from zerojax.weights.names import link
from zerojax.weights.reader import FileTensor
from zerojax.weights.shards import to_host

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


def sharded_like(config: GPTConfig, **settings: int) -> Any:
    """Shapes and shardings of the parameters at stage 3 on all devices."""
    zero = zerojax.zero(stage=3, **settings)
    return zero.abstract_state(create_state_of(config), jax.random.key(0)).params


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


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("stage", [0, 3])
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


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="torch and transformers are not installed: nothing to compare a saved folder with",
)
@pytest.mark.parametrize("how", ["saved", "exported"])
def test_transformers_reads_a_folder(how: str, tmp_path: pathlib.Path) -> None:
    import torch
    import transformers

    params, tokens = init(TINY), np.arange(24).reshape(2, 12)
    if how == "saved":
        save(params, TINY, tmp_path, max_shard_size=20_000)
    else:
        checkpoint(tmp_path / "in", stacked(params), SCANNED)
        export(tmp_path / "in", tmp_path / "out", max_shard_size=20_000, names=export_names)
        tmp_path /= "out"
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(
        jax.jit(GPT(TINY).apply)({"params": params}, tokens), expected, atol=1e-5
    )
    model.save_pretrained(tmp_path / "again", safe_serialization=True)
    assert_same(load(tmp_path / "again", read_config(tmp_path / "again")), params)


def test_a_saved_folder_has_hugging_faces_names_and_shapes(folder: pathlib.Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    assert len(tensors) == 12 * TINY.n_layer + 4
    assert tensors["h.2.attn.c_attn.weight"].shape == (16, 48)
    assert tensors["h.0.mlp.c_proj.weight"].shape == (64, 16)
    assert tensors["wpe.weight"].shape == (32, 16)
    np.testing.assert_array_equal(tensors["ln_f.bias"], init(TINY)["ln_f"]["bias"])
    assert sorted(p.name for p in folder.iterdir()) == ["config.json", "model.safetensors"]


@MODELS
def test_what_was_saved_is_loaded(config: GPTConfig, folder: pathlib.Path) -> None:
    expected = stacked(init(TINY)) if config.scan else init(TINY)
    assert_same(load(folder, config), expected)
    save(load(folder, config), config, folder.parent / "again", max_shard_size=20_000)
    assert_same(load(folder.parent / "again", config), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [pytest.param(TINY, marks=pytest.mark.sweep), SCANNED], ids=["unrolled", "scanned"]
)
def test_a_state_at_stage_3_trains_on_from_loaded_weights(
    config: GPTConfig, folder: pathlib.Path
) -> None:
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0)
    state = zero.init(create_state_of(config), jax.random.key(7))
    shardings = jax.tree.map(lambda x: x.sharding, state.params)
    loaded = load(folder, config, like=state.params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    assert_same(loaded, load(folder, config))
    assert_same(load(folder, config, like=shardings), loaded)
    tokens = jnp.arange(8 * 16).reshape(8, 16) % 96

    def train_step(state: Any, batch: jax.Array) -> tuple[Any, jax.Array]:
        def loss(params: Any) -> jax.Array:
            return loss_fn(state.apply_fn({"params": params}, batch[:, :-1]), batch[:, 1:])

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    state, value = zero(train_step)(state.replace(params=loaded), tokens)
    logits = jax.jit(GPT(config).apply)({"params": load(folder, config)}, tokens[:, :-1])
    np.testing.assert_allclose(value, loss_fn(logits, tokens[:, 1:]), rtol=1e-5)
    save(state.params, config, folder)
    assert_same(load(folder, config), jax.device_get(state.params))


def test_the_nnx_twin_loads_too(folder: pathlib.Path) -> None:
    model = nnx.eval_shape(lambda: gpt_nnx.GPT(TINY, rngs=nnx.Rngs(0)))
    like = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    nnx.update(model, load(folder, TINY, like=like))
    assert_same(nnx.to_pure_dict(nnx.state(model, nnx.Param)), init(TINY))


@pytest.mark.parametrize("kind", [np.float16, ml_dtypes.bfloat16, np.float64])
def test_other_floats_become_float32_or_what_is_asked(folder: pathlib.Path, kind: Any) -> None:
    def change(tensors: Arrays) -> None:
        tensors |= {name: value.astype(kind) for name, value in tensors.items()}

    rewrite(folder, change)
    expected = jax.tree.map(lambda x: np.asarray(x).astype(kind).astype(np.float32), init(TINY))
    loaded = load(folder, TINY)
    assert {x.dtype for x in jax.tree.leaves(loaded)} == {jnp.dtype(jnp.float32)}
    assert_same(loaded, expected)
    half = load(folder, SCANNED, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(half)} == {jnp.dtype(jnp.bfloat16)}
    save(half, SCANNED, folder)
    assert load_file(folder / "model.safetensors")["ln_f.bias"].dtype == ml_dtypes.bfloat16


def test_prefix_and_buffers_and_a_tied_head_are_known(folder: pathlib.Path) -> None:
    def change(tensors: Arrays) -> None:
        named = {f"transformer.{name}": value for name, value in tensors.items()}
        tensors.clear()
        tensors |= named | {"lm_head.weight": named["transformer.wte.weight"]}
        tensors["transformer.h.1.attn.bias"] = np.ones((1, 1, 32, 32), np.uint8)
        tensors["transformer.h.1.attn.masked_bias"] = np.array(-1e4, np.float32)

    file = rewrite(folder, change)
    assert_same(load(file, TINY), init(TINY))
    rewrite(folder, lambda tensors: tensors["lm_head.weight"].__iadd__(1))
    with pytest.raises(ValueError, match=r"lm_head.weight \[96, 16\] differs from .*wte.weight"):
        load(folder, TINY)


# What is read and held


class Reads:
    """Counts what is read of the files' tensors, in bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: dict[str, list[int]] = {}
        read = FileTensor.read

        def counted(tensor: FileTensor, out: np.ndarray, *at: Any) -> np.ndarray:
            size = out.size * np.dtype(tensor.dtype).itemsize
            self.sizes.setdefault(tensor.name, []).append(size)
            return read(tensor, out, *at)

        monkeypatch.setattr(FileTensor, "read", counted)

    @property
    def total(self) -> int:
        return sum(map(sum, self.sizes.values()))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.mark.parametrize("scan", [False, True])
def test_64_mb_are_read_once_and_never_more_than_a_shard(
    scan: bool, tmp_path: pathlib.Path, reads: Reads
) -> None:
    config = GPTConfig(
        vocab_size=6500, block_size=128, n_layer=4, n_head=8, n_embd=512, scan=scan
    )  # fmt: skip
    like = sharded_like(config)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), like)
    save(zeros, config, tmp_path)
    size = sum(x.nbytes for x in jax.tree.leaves(zeros))
    assert size > 64e6
    params = load(tmp_path, config, like=like)
    assert reads.total == size

    sharded = 0
    links = link(NAMES, {path: x.shape for path, x in by_path(params).items()}).links
    for path, leaf in by_path(params).items():
        shard = 4 * math.prod(leaf.sharding.shard_shape(leaf.shape))
        names = [part.tensor for part in links[path]]
        longest = max(max(reads.sizes[name]) for name in names)
        assert longest == shard // len(names)  # a stacked parameter is read layer by layer
        sharded += leaf.nbytes if shard == leaf.nbytes // 8 else 0
    assert sharded > 0.99 * size


@pytest.mark.slow
def test_the_host_holds_one_piece_at_a_time(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(TINY, n_embd=256, n_layer=8, scan=True)
    params, like = init(config), sharded_like(config, stage3_param_persistence_threshold=0)
    save(params, config, tmp_path)
    load(tmp_path, config, like=like)  # what it compiles and imports is not counted
    largest = max(x.nbytes for x in jax.tree.leaves(params)) // 8
    taken, kept = host_bytes(lambda: load(tmp_path, config, like=like))
    assert taken - kept < 3 * largest  # a piece, its layer, a piece not yet given back


@pytest.mark.slow
def test_saving_holds_one_tensor_at_a_time(tmp_path: pathlib.Path) -> None:
    config = dataclasses.replace(TINY, n_embd=256, n_layer=8)
    like = sharded_like(config, stage3_param_persistence_threshold=0)
    params = jax.tree.map(lambda x, s: jax.device_put(x, s.sharding), init(config), like)
    limit = 4_000_000
    assert sum(x.nbytes for x in jax.tree.leaves(params)) > 6 * limit
    save(params, config, tmp_path, max_shard_size=limit)
    taken, _ = host_bytes(lambda: save(params, config, tmp_path, max_shard_size=limit))
    largest = 4 * 256 * 1024
    assert taken < 1.75 * largest < limit / 2  # not two, and not a file


def host_bytes(run: Callable[[], Any]) -> tuple[int, int]:
    """Python's and NumPy's memory that a call took at the most, and what its result keeps of it.

    The least of three calls: other threads of this process, such as those that write compiled
    programs to the cache, are counted too. On a CPU, JAX takes over NumPy's memory where it is
    aligned: that is the result's.
    """
    return min(_host_bytes(run) for _ in range(3))


def _host_bytes(run: Callable[[], Any]) -> tuple[int, int]:
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        result = jax.block_until_ready(run())
        after, most = tracemalloc.get_traced_memory()
        del result
        return most - before, after - before
    finally:
        tracemalloc.stop()


def test_a_piece_that_several_devices_hold_is_read_once(folder: pathlib.Path, reads: Reads) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, PartitionSpec(None, "model"))
    whole = NamedSharding(mesh, PartitionSpec())
    like = jax.tree.map(lambda x: sharding if x.ndim == 2 else whole, init(TINY))
    assert_same(load(folder, TINY, like=like), init(TINY))
    assert reads.total == sum(x.nbytes for x in jax.tree.leaves(init(TINY)))


def test_layers_may_be_what_is_sharded_and_lie_on_the_host(folder: pathlib.Path) -> None:
    mesh = jax.make_mesh((3,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    by_layer = NamedSharding(mesh, PartitionSpec("data"), memory_kind="pinned_host")
    expected = stacked(init(TINY))
    like = {
        name: jax.tree.map(lambda _, n=name: by_layer if n == "h" else None, part)
        for name, part in expected.items()
    }
    like = jax.tree.map(
        lambda s, x: s or x.sharding, like, expected, is_leaf=lambda s: s is None
    )  # fmt: skip
    params = load(folder, SCANNED, like=like)
    assert params["h"]["ln_1"]["bias"].sharding == by_layer
    assert_same(params, expected)
    save(params, SCANNED, folder)
    assert_same(load(folder, SCANNED), expected)


# Files


def test_large_models_are_cut_into_files_with_an_index(tmp_path: pathlib.Path) -> None:
    save(init(TINY), TINY, tmp_path, max_shard_size=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert set(index["weight_map"].values()) == {file.name for file in files}
    tensors = {file.name: load_file(file) for file in files}
    assert all(name in tensors[file] for name, file in index["weight_map"].items())
    sizes = [sum(x.nbytes for x in each.values()) for each in tensors.values()]
    assert max(sizes) <= 20_000
    assert index["metadata"]["total_size"] == sum(sizes)
    assert len(files) <= sum(sizes) // 20_000 + 3


def test_nothing_of_an_earlier_save_is_left_to_be_taken_for_this_one(
    folder: pathlib.Path,
) -> None:
    (folder / "tokenizer.json").write_text("{}")
    save(init(TINY, seed=1), TINY, folder, max_shard_size=20_000)
    assert not (folder / "model.safetensors").exists()
    assert_same(load(folder, TINY), init(TINY, seed=1))
    save(init(TINY, seed=2), TINY, folder)
    names = sorted(p.name for p in folder.iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert_same(load(folder, TINY), init(TINY, seed=2))


def test_a_save_that_fails_leaves_what_was_there(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    calls = 0

    def failing(array: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 20:
            raise OSError("no space left on device")
        return to_host(array)

    monkeypatch.setattr(saver, "to_host", failing)
    with pytest.raises(OSError, match="no space left"):
        save(init(TINY, seed=1), TINY, folder, max_shard_size=20_000)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for wrong in (0, True, 1.5, "5GB"):
        with pytest.raises(ValueError, match="must be a positive int in bytes"):
            save(init(TINY), TINY, folder, max_shard_size=wrong)


def test_parameters_of_another_model_are_not_saved(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"only the tree given has the parameter h/.*scan"):
        save(init(SCANNED), TINY, tmp_path / "new")
    wider = dataclasses.replace(TINY, vocab_size=100)
    with pytest.raises(ValueError, match=r"wte/embedding is \[100, 16\] .* \[96, 16\] in GPT"):
        save(init(wider), TINY, tmp_path / "new")
    assert not (tmp_path / "new").exists()


# Of a checkpoint


@MODELS
def test_a_checkpoint_is_exported_as_it_would_be_saved(
    config: GPTConfig, tmp_path: pathlib.Path
) -> None:
    params = stacked(init(TINY)) if config.scan else init(TINY)
    checkpoint(tmp_path / "in", params, config)
    export(tmp_path / "in", tmp_path / "out", max_shard_size=20_000, names=export_names)
    save(params, config, tmp_path / "saved", max_shard_size=20_000)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()
    }
    assert read_config(tmp_path / "out") == TINY
    assert_same(load(tmp_path / "out", config), params)


def test_16_bits_are_exported(tmp_path: pathlib.Path) -> None:
    params = stacked(init(TINY))
    checkpoint(tmp_path / "in", params, SCANNED)
    export(tmp_path / "in", tmp_path / "out", dtype="bf16", names=export_names)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    assert_same(load(tmp_path / "out", SCANNED, dtype=jnp.bfloat16), half)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["a"], "model'] is None, but vocab_size, block_size, n_layer, n_head, n_embd of the GPT"),
        ({"model": {"n_layer": 3}}, r"\['model'\] is {'n_layer': 3}, but vocab_size"),
        ({"model": vars(TINY) | {"n_layer": 2}}, "only the tree given has the parameter h_2"),
        ({"model": vars(TINY) | {"block_size": 8}}, r"wpe/embedding is \[32, 16\] in the tree"),
        ({"model": vars(TINY) | {"n_head": 3}}, "n_embd = 16 does not divide into"),
    ],
)
def test_a_checkpoint_must_say_what_model_it_is(extra: Any, message: str) -> None:
    leaves = {name.replace("/", "."): x.shape for name, x in by_path(init(TINY)).items()}
    with pytest.raises(ValueError, match=message):
        export_names(leaves, extra)


# Bad input


def cut(folder: pathlib.Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def header_only(folder: pathlib.Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: 8 + struct.unpack("<Q", data[:8])[0]])


def text(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")


def empty(folder: pathlib.Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize("damage", [cut, header_only, text, empty])
def test_a_damaged_file_is_refused(
    folder: pathlib.Path, damage: Callable[[pathlib.Path], None], reads: Reads
) -> None:
    damage(folder)
    with pytest.raises(
        ValueError,
        match=r"model.safetensors \(\d+ bytes\) is cut short or no safetensors .* copy it again",
    ):
        load(folder, TINY)
    assert not reads.sizes


def without(name: str) -> Callable[[Arrays], Any]:
    return lambda tensors: tensors.pop(name)


def with_(name: str, value: np.ndarray) -> Callable[[Arrays], Any]:
    return lambda tensors: tensors.update({name: value})


FLOATS = np.zeros((4, 16), np.float32)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("h.1.mlp.c_fc.bias"), r"  h.1.mlp.c_fc.bias \[64\] is missing"),
        (without("wte.weight"), r"wte.weight \[96, 16\] is missing"),
        (with_("h.0.attn.extra", FLOATS), r"  h.0.attn.extra \[4, 16\] is one tensor"),
        (with_("score.weight", FLOATS), r"score.weight \[4, 16\] is one tensor too many"),
        (with_("transformer.wpe.weight", FLOATS), "wpe.weight is there twice"),
        (with_("ln_f.bias", np.zeros(15, np.float32)), r"ln_f.bias is \[15\], .* needs \[16\]"),
        (
            with_("h.0.mlp.c_fc.weight", np.zeros((64, 16), np.float32)),
            r"h.0.mlp.c_fc.weight is \[64, 16\], the model needs \[16, 64\]: transpose",
        ),
        (with_("wte.weight", FLOATS), r"wte.weight is \[4, 16\], .* needs \[96, 16\]"),
        (
            with_("ln_f.bias", np.zeros(16, np.int32)),
            r"ln_f.bias \[16\] is I32, .* ln_f/bias",
        ),
        (with_("ln_f.bias", np.zeros(16, bool)), "ln_f.bias .* is BOOL"),
        (with_("h.3.ln_1.bias", FLOATS), r"h.3.ln_1.bias \[4, 16\] is one tensor too many"),
        (lambda tensors: tensors.clear(), "and 35 more"),
        (with_("lm_head.weight", FLOATS), r"lm_head.weight \[4, 16\] differs from wte"),
    ],
)
@MODELS
def test_tensors_that_do_not_fit_are_named(
    config: GPTConfig,
    folder: pathlib.Path,
    change: Callable[[Arrays], Any],
    message: str,
    reads: Reads,
) -> None:
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message) as error:
        load(folder, config)
    assert "nothing was loaded" in str(error.value)
    assert not reads.sizes


def test_an_index_and_its_files_must_agree(folder: pathlib.Path) -> None:
    save(init(TINY), TINY, folder, max_shard_size=20_000)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())

    def load_with(places: Any) -> None:
        index.write_text(json.dumps(good | {"weight_map": places}))
        load(folder, TINY)

    places = good["weight_map"]
    first = places["wte.weight"]
    with pytest.raises(ValueError, match=f"says nothing of wte.weight in {first}"):
        load_with({name: file for name, file in places.items() if name != "wte.weight"})
    with pytest.raises(ValueError, match=f"places nonsense in {first}, the file lacks it"):
        load_with(places | {"nonsense": first})
    with pytest.raises(ValueError, match="no weight_map"):
        load_with(["wte.weight"])
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json: not JSON"):
        load(folder, TINY)
    index.write_text(json.dumps(good))
    shutil.move(folder / first, folder.parent / first)
    with pytest.raises(FileNotFoundError, match=f"index.json names {first}, which is not"):
        load(folder, TINY)


def test_a_path_that_is_not_there(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.safetensors is not there"):
        load(tmp_path / "none.safetensors", TINY)
    with pytest.raises(FileNotFoundError, match=r"has neither model.safetensors nor"):
        load(tmp_path, TINY)
    with pytest.raises(FileNotFoundError, match=r"config.json is not there"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 16}, r"config.json: n_positions = 32, but the model has block_size = 16"),
        ({"vocab_size": 97}, "vocab_size = 96, but the model has vocab_size = 97"),
        ({"n_head": 4}, "n_head = 2, but the model has n_head = 4"),  # no shape shows it
        ({"n_layer": 2}, "n_layer = 3, but the model has n_layer = 2"),
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
    with pytest.raises(ValueError, match="shall be int32: weights are floats"):
        load(folder, TINY, dtype=jnp.int32)


def test_the_extra_is_named_where_the_package_is_missing(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    load(folder, TINY)  # needs no package
    with pytest.raises(ImportError, match=r"pip install -e '\.\[export\]'"):
        save(init(TINY), TINY, folder)


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
        ({"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon = 1e-06 is not supported"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True"),
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({"n_inner": 100}, "n_inner = 100 is not supported: .*3072 wide"),
        ({"attn_pdrop": 0.2}, "one dropout rate for all"),
        ({"n_positions": "1024"}, "block_size must be a positive int"),
        ({"n_head": 7}, "does not divide into n_head = 7"),
        (dict.fromkeys(DROPOUTS, "0.1"), "dropout must be in"),
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
