"""Weights of any model by maps: each device's piece once, and errors before anything is read."""

import json
import logging
import os
import pathlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from safetensors.numpy import load_file, save_file

import zerojax
from zerojax.plan.stored import StoredArray
from zerojax.weights import Names, Tensor, load, save

pytestmark = pytest.mark.usefixtures("quick_compile")

Tensors = dict[str, np.ndarray]
# 8 devices share the table's dimensions by 4 and 2, and for 3 it is padded.
ROWS, WIDTH, HEADS, LAYERS = 1100, 10, 5, 2
QKV = {"part": ("query", "key", "value")}
SHAPES = {
    "embed.weight": (ROWS, WIDTH),
    "norm.weight": (WIDTH,),
    **{f"h.{i}.attn.c_attn.weight": (WIDTH, 3 * WIDTH) for i in range(LAYERS)},
    **{f"h.{i}.mlp.up.weight": (20, WIDTH) for i in range(LAYERS)},
}
TENSORS = {
    name: np.random.default_rng(i).normal(size=shape).astype(np.float32)
    for i, (name, shape) in enumerate(SHAPES.items())
}
# One file, as three models would have it.
FUSED = "h.{layer}.attn.c_attn.weight"
APART = Names({
    "embed/embedding": "embed.weight",
    "norm/scale": "norm.weight",
    "h_{layer:int}/attn/{part}/kernel": Tensor(FUSED, "i (part h d) -> i h d", parts=QKV),
    "h_{layer:int}/{module:path}/kernel": Tensor("h.{layer}.{module}.weight", "o i -> i o"),
})  # fmt: skip
STACKED = Names({
    "embed/embedding": "embed.weight",
    "norm/scale": "norm.weight",
    "h/attn/kernel": Tensor(FUSED, "... -> layer ..."),
    "h/{module:path}/kernel": Tensor("h.{layer}.{module}.weight", "o i -> layer i o"),
})  # fmt: skip
TIED = Names({**STACKED.tensors, "head/kernel": Tensor("embed.weight", "v i -> i v", tied=True)})


def apart() -> Any:
    heads = (WIDTH, HEADS, WIDTH // HEADS)

    def layer(i: int) -> Any:
        fused = np.split(TENSORS[FUSED.format(layer=i)], 3, axis=1)
        attn = {p: {"kernel": x.reshape(heads)} for p, x in zip(QKV["part"], fused, strict=True)}
        return {"attn": attn, "mlp": {"up": {"kernel": TENSORS[f"h.{i}.mlp.up.weight"].T}}}

    return {
        "embed": {"embedding": TENSORS["embed.weight"]},
        "norm": {"scale": TENSORS["norm.weight"]},
        **{f"h_{i}": layer(i) for i in range(LAYERS)},
    }


def stacked() -> Any:
    fused = np.stack([TENSORS[FUSED.format(layer=i)] for i in range(LAYERS)])
    up = np.stack([TENSORS[f"h.{i}.mlp.up.weight"].T for i in range(LAYERS)])
    return {
        "embed": {"embedding": TENSORS["embed.weight"]},
        "norm": {"scale": TENSORS["norm.weight"]},
        "h": {"attn": {"kernel": fused}, "mlp": {"up": {"kernel": up}}},
    }


def tied() -> Any:
    return stacked() | {"head": {"kernel": TENSORS["embed.weight"].T}}


def sharded(params: Any, devices: int = 8) -> Any:
    """Shapes and shardings at stage 3."""
    zero = zerojax.zero(stage=3, stage3_param_persistence_threshold=0, mesh=zerojax.mesh(devices))
    return zero.abstract_state(lambda: state_of(jax.tree.map(jnp.asarray, params))).params


def state_of(params: Any) -> TrainState:
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(1e-6))


def assert_same(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), expected)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    (tmp_path / "in").mkdir()
    save_file(TENSORS, tmp_path / "in" / "model.safetensors", {"format": "pt"})
    return tmp_path / "in"


@pytest.mark.parametrize(
    ("model", "names", "devices"),
    [(apart, APART, 8), (stacked, STACKED, 3), (tied, TIED, 8)],
    ids=["apart", "stacked", "tied"],
)
def test_there_and_back(
    model: Callable[[], Any], names: Names, devices: int, folder: pathlib.Path
) -> None:
    like = sharded(model(), devices)
    params = load(folder, like=like, names=names)
    jax.tree.map(np.testing.assert_array_equal, params, model())
    assert isinstance(params["embed"]["embedding"], StoredArray)
    save(folder / "again", params, names, max_shard_size=2000)
    found: Tensors = {}
    for file in (folder / "again").glob("*.safetensors"):
        found |= load_file(file)
    assert_same(found, TENSORS)
    assert_same(load(folder / "again", like=model(), names=names), model())


def test_every_byte_is_read_once(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    preadv = os.preadv

    def counted(fd: int, buffers: Any, offset: int) -> int:
        count = preadv(fd, buffers, offset)
        read.append((offset, offset + count))
        return count

    monkeypatch.setattr(os, "preadv", counted)
    size = (folder / "model.safetensors").stat().st_size
    begin = size - sum(x.nbytes for x in TENSORS.values())
    for model, names, devices in ((apart, APART, 8), (stacked, STACKED, 3)):
        like = sharded(model(), devices)
        read.clear()
        load(folder, like=like, names=names)
        # They cover the tensors and do not overlap.
        assert [start for start, _ in sorted(read)] == [begin, *(end for _, end in sorted(read))][
            :-1
        ]
        assert max(end for _, end in read) == size


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(10, WIDTH, rngs=rngs)
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(2)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


NET = {
    "embed/embedding": "wte.weight",
    "norm/mean": "norm.running_mean",
    "norm/var": "norm.running_var",
    "layers/{i}/kernel": Tensor("layers.{i}.weight", "o i -> i o"),
    "norm/scale": "norm.weight",
    "{module:path}/bias": "{module}.bias",
}


@pytest.mark.parametrize("abstract", [True, False])
def test_nnx_modules_and_states(abstract: bool, tmp_path: pathlib.Path) -> None:
    model = Net(nnx.Rngs(1))
    save(tmp_path, model, NET)
    tensors = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(tensors["layers.1.weight"], model.layers[1].kernel[...].T)
    assert {"norm.running_var", "norm.weight", "norm.bias"} <= tensors.keys()
    assert not any("rngs" in name for name in tensors)

    def create() -> Net:
        return Net(nnx.Rngs(2))

    like = nnx.eval_shape(create) if abstract else create()
    loaded = load(tmp_path, like=like, names=NET)
    assert isinstance(loaded, Net)
    assert_same(values(loaded, nnx.Param), values(model, nnx.Param))
    assert_same(values(loaded, nnx.BatchStat), values(model, nnx.BatchStat))
    key = loaded.dropout.rngs.key.get_value()
    assert key == create().dropout.rngs.key.get_value() or abstract
    assert isinstance(key, jax.ShapeDtypeStruct) == abstract

    params = {path: name for path, name in NET.items() if "running" not in str(name)}
    names = Names(params, ignored=["norm.running_{x}"])
    state = load(tmp_path, like=nnx.state(like, nnx.Param), names=names)
    assert isinstance(state, nnx.State)
    assert_same(jax.device_get(nnx.to_pure_dict(state)), values(model, nnx.Param))


def values(model: Net, kind: Any) -> Any:
    return jax.device_get(nnx.to_pure_dict(nnx.state(model, kind)))


def test_linens_boxes_stay(tmp_path: pathlib.Path) -> None:
    init = nn.with_partitioning(nn.initializers.ones, (None, "data"))
    params = nn.Dense(4, kernel_init=init).init(jax.random.key(0), jnp.ones((1, 3)))["params"]
    save(tmp_path, params)
    assert load_file(tmp_path / "model.safetensors").keys() == {"kernel", "bias"}
    loaded = load(tmp_path, like=jax.eval_shape(lambda: params))
    assert isinstance(loaded["kernel"], nn.Partitioned)
    assert_same(loaded, jax.device_get(params))


def test_a_parameter_without_a_tensor_stays(folder: pathlib.Path) -> None:
    head = {"kernel": jnp.ones((WIDTH, 2))}
    names = Names({**STACKED.tensors, "head/kernel": None})
    loaded = load(folder, like=stacked() | {"head": head}, names=names)
    assert loaded["head"]["kernel"] is head["kernel"]
    save(folder / "out", loaded, names)
    assert load_file(folder / "out" / "model.safetensors").keys() == TENSORS.keys()


def test_dtypes_are_those_of_like_and_casts_are_told(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    half = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), stacked())
    with caplog.at_level(logging.WARNING):
        loaded = load(folder, like=half, names=STACKED)
        load(folder, like=stacked(), names=STACKED)
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder}: 6 tensors F32 become bfloat16, the dtype of `like`."
    ]
    assert_same(loaded, jax.tree.map(lambda x: x.astype(jnp.bfloat16), stacked()))
    save(folder / "half", loaded, STACKED)
    save(folder / "same", stacked(), STACKED, dtype=jnp.bfloat16)
    halves = [(folder / name / "model.safetensors").read_bytes() for name in ("half", "same")]
    assert halves[0] == halves[1]


def test_numbers_beyond_a_dtype(tmp_path: pathlib.Path) -> None:
    save_file({"a": np.array([1, 1e6], np.float32)}, tmp_path / "model.safetensors")
    like = {"a": jax.ShapeDtypeStruct((2,), jnp.float16)}
    with pytest.raises(ValueError, match=r"model.safetensors: a holds 1e\+06, and float16 ends at"):
        load(tmp_path, like=like)
    with pytest.raises(ValueError, match="a holds"):
        save(tmp_path, load(tmp_path, like={"a": np.zeros(2, np.float32)}), dtype=jnp.float16)


# Bad input: nothing is read


def changed(**tensors: Any) -> Callable[[pathlib.Path], Any]:
    """A file with tensors changed; None removes one."""

    def change(folder: pathlib.Path) -> None:
        held = TENSORS | {name.replace("_", "."): x for name, x in tensors.items()}
        held = {name: x for name, x in held.items() if x is not None}
        save_file(held, folder / "model.safetensors")

    return change


def unindexed(folder: pathlib.Path) -> None:
    save(folder, stacked(), STACKED, max_shard_size=2000)
    min(folder.glob("model-00002-*")).unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(norm_weight=None), r"  norm.weight \[10\] is missing"),
        (changed(norm_weight=np.ones(7)), r"norm.weight is \[7\], .* \[10\] \(for norm/scale\)"),
        (
            changed(embed_weight=np.ones((10, 1100))),
            r'needs \[1100, 10\]: write .*"o i -> i o"',
        ),
        (changed(norm_weight=np.ones(10, np.int8)), "norm.weight .* is I8, .* norm/scale float32"),
        (unindexed, "index.json names model-00002-of-.*, which is not there"),
    ],
)
def test_files_that_do_not_fit(
    change: Callable[[pathlib.Path], Any],
    message: str,
    folder: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    change(folder)
    monkeypatch.setattr(os, "preadv", None)  # would fail
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load(folder, like=stacked(), names=STACKED)


def without(path: str) -> Any:
    return {name: rule for name, rule in STACKED.tensors.items() if name != path}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (without("norm/scale"), r"norm/scale \[10\] has no name"),
        (STACKED.tensors | {"norm/scales": "a"}, "norm/scales is no .*; the nearest is norm/scale"),
        (
            STACKED.tensors | {"norm/scale": "embed.weight"},
            r"is \[10\] by norm/scale, and \[1100, 10\]",
        ),
        (
            STACKED.tensors | {"h/attn/kernel": Tensor(FUSED, "i (part o) -> layer i o", QKV)},
            "h/attn/kernel .* part is on one side of ->",
        ),
    ],
)
def test_names_that_do_not_fit(names: Any, message: str, folder: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=message):
        load(folder, like=stacked(), names=names)
    with pytest.raises(ValueError, match=message):
        save(folder / "new", stacked(), names)
    assert not (folder / "new").exists()


def test_tensors_that_are_partly_used_or_shared(folder: pathlib.Path) -> None:
    one = apart()
    del one["h_1"]["attn"]["key"]
    with pytest.raises(
        ValueError, match=r"h.1.attn.c_attn.weight \[10, 30\] has 300 .* take 200 of"
    ):
        load(folder, like=one, names=APART)
    untied = Names({**TIED.tensors, "head/kernel": Tensor("embed.weight", "v i -> i v")})
    with pytest.raises(ValueError, match=r"parameters take 22000 .* tied=True"):
        load(folder, like=tied(), names=untied)
    other = tied() | {"head": {"kernel": np.ones((WIDTH, ROWS), np.float32)}}
    with pytest.raises(ValueError, match=r"head/kernel and embed/embedding are both embed.weight"):
        save(folder / "out", other, TIED)
    assert not (folder / "out").exists()


def test_a_copy_in_the_file_must_be_one(folder: pathlib.Path) -> None:
    names = Names(STACKED.tensors, tied={"head.weight": "embed.weight"})
    changed(head_weight=TENSORS["embed.weight"])(folder)
    assert_same(load(folder, like=stacked(), names=names), stacked())
    changed(head_weight=TENSORS["embed.weight"] + 1)(folder)
    with pytest.raises(ValueError, match=r"head.weight \[1100, 10\] differs from embed.weight"):
        load(folder, like=stacked(), names=names)


def test_config_is_passed_through(folder: pathlib.Path) -> None:
    save(folder, stacked(), STACKED, config={"model_type": "mine"})
    save(folder / "again", stacked(), STACKED, config=folder)
    for each in (folder, folder / "again"):
        assert json.loads((each / "config.json").read_text()) == {"model_type": "mine"}
    with pytest.raises(FileNotFoundError, match=r"config: .*nothing does not exist"):
        save(folder, stacked(), STACKED, config=folder / "nothing")
