"""Hugging Face's Llama weights: the logits are transformers', and what does not fit is named."""

import dataclasses
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint import recorded

from zerojax.checkpoint.exporter import export
from zerojax.models.hugging_face.llama import (
    config_from_hf,
    config_to_hf,
    export_names,
    from_hf,
    load,
    read_config,
    save,
    shapes_of,
)
from zerojax.models.llama import SIZES, Llama, LlamaConfig
from zerojax.weights import stacked

# Logits [2, 2, 12, 61] of transformers 5.23.0 with torch 2.15.0 on a CPU, one array for each of
# THEIRS, in fp32. Made by `np.save(LOGITS, transformers_logits())`, which a test below compares
# where both are installed.
LOGITS = Path(__file__).parent / "data" / "llama_logits.npy"
GROUPED = LlamaConfig(
    vocab_size=61, block_size=16, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, n_inner=88,
    rope_theta=1000.0, rms_norm_eps=1e-5,
)  # fmt: skip
TIED = dataclasses.replace(GROUPED, n_kv_head=None, tie_word_embeddings=True)
THEIRS = (GROUPED, TIED)
TOKENS = np.random.default_rng(1).integers(0, GROUPED.vocab_size, (2, 12))

Tensors = dict[str, np.ndarray]
GATE, TABLE = "model.layers.1.mlp.gate_proj.weight", "model.embed_tokens.weight"

pytestmark = pytest.mark.usefixtures("quick_compile")


def weights(config: LlamaConfig, seed: int = 0) -> Tensors:
    """Drawn wide enough that no part of the model is without effect; the norms around 1."""
    rng, tensors = np.random.default_rng(seed), {}
    for name, shape in sorted(shapes_of(config).items()):
        drawn = 0.2 * rng.standard_normal(shape) + (len(shape) == 1)
        tensors[name] = drawn.astype(np.float32)
    return tensors


def transformers_logits() -> np.ndarray:
    """What LlamaForCausalLM makes of the weights of seed 0."""
    import torch
    import transformers

    found = []
    for config in THEIRS:
        theirs = transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.block_size,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            hidden_size=config.n_embd,
            intermediate_size=config.n_inner,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            rms_norm_eps=config.rms_norm_eps,
            tie_word_embeddings=config.tie_word_embeddings,
        )
        tensors = {name: torch.from_numpy(each) for name, each in weights(config).items()}
        if config.tie_word_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        model = transformers.LlamaForCausalLM(theirs).eval()
        model.load_state_dict(tensors)
        with torch.no_grad():
            found.append(model(torch.from_numpy(TOKENS)).logits.numpy())
    return np.stack(found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("which", range(len(THEIRS)), ids=["grouped", "tied"])
def test_logits_are_transformers(which: int, scan: bool) -> None:
    config = dataclasses.replace(THEIRS[which], scan=scan)
    params = from_hf(weights(config), config)
    logits = jax.jit(Llama(config).apply)({"params": params}, TOKENS)
    np.testing.assert_allclose(logits, np.load(LOGITS)[which], atol=1e-5, rtol=0)


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torch", "transformers"))),
    reason="torch and transformers are not installed: nothing to compare the stored logits with",
)
@pytest.mark.filterwarnings("default")
def test_the_stored_logits_are_what_transformers_computes_here() -> None:
    np.testing.assert_allclose(transformers_logits(), np.load(LOGITS), atol=1e-5, rtol=0)


def test_names_and_shapes_make_up_the_published_model() -> None:
    shapes = shapes_of(LlamaConfig(**SIZES["llama-70b"]))
    assert len(shapes) == 80 * 9 + 3
    assert sum(map(math.prod, shapes.values())) == 68_976_648_192


def test_names_without_the_prefix_and_old_buffers_are_taken() -> None:
    tensors = {name.removeprefix("model."): each for name, each in weights(GROUPED).items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    loaded = from_hf(tensors, GROUPED)
    jax.tree.map(np.testing.assert_array_equal, loaded, from_hf(weights(GROUPED), GROUPED))
    gate = loaded["layers_1"]["mlp"]["gate_proj"]["kernel"]
    np.testing.assert_array_equal(gate, weights(GROUPED)[GATE].T)


def test_scanned_parameters_are_the_stacked_ones() -> None:
    params = from_hf(weights(GROUPED), GROUPED)
    scanned = from_hf(weights(GROUPED), dataclasses.replace(GROUPED, scan=True))
    jax.tree.map(np.testing.assert_array_equal, scanned, stacked(params, "layers_{}"))


def test_a_tied_output_may_be_there_twice() -> None:
    tensors = weights(TIED)
    tensors["lm_head.weight"] = tensors[TABLE]
    jax.tree.map(
        np.testing.assert_array_equal, from_hf(tensors, TIED), from_hf(weights(TIED), TIED)
    )
    tensors["lm_head.weight"] = tensors[TABLE] + 1
    with pytest.raises(ValueError, match=r"lm_head.weight .* differs from .*embed_tokens.weight"):
        from_hf(tensors, TIED)


@pytest.mark.parametrize("scan", [False, True])
def test_saved_exported_and_loaded(scan: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(GROUPED, scan=scan)
    params = from_hf(weights(GROUPED), config)
    save(params, config, tmp_path / "saved", max_shard_size=20_000)
    about = {name: value for name, value in vars(config).items() if name != "dtype"}
    arrays = jax.tree.map(jax.numpy.asarray, params)
    recorded.save(tmp_path / "in", 1, {"params": arrays}, extra={"model": about})
    export(tmp_path / "in", tmp_path / "out", max_shard_size=20_000, names=export_names)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == {
        file.name: file.read_bytes() for file in (tmp_path / "saved").iterdir()
    }
    assert read_config(tmp_path / "out") == GROUPED
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path / "out", config), params)
    with pytest.raises(ValueError, match=r"rope_theta = 1000.0, but the model has rope_theta = 1"):
        load(tmp_path / "out", dataclasses.replace(config, rope_theta=1.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_parameters: factor = 2.0 is not supported: rope"),
        (
            {"rope_scaling": {"type": "ntk"}},
            "rope_type = 'ntk' is not supported: .* longrope",
        ),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type = 'yarn' needs factor"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "alpha": 1}},
            "alpha = 1 is not supported",
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": 0}},
            "truncate must be True or False, not 0",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type = 'linear' needs factor"),
        ({"head_dim": 63}, "must rotate an even number of 63 features"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(values: dict[str, Any], message: str) -> None:
    assert config_from_hf(config_to_hf(TIED)) == TIED
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)


def put(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {n: x for n, x in t.items() if n != GATE},
            r"gate_proj.weight \[88, 32\] is mis",
        ),
        (lambda t: t | {"model.layers.2.x": t[GATE]}, r"layers.2.x \[88, 32\] is one tensor"),
        (put(GATE, np.transpose), r"is \[32, 88\], the model needs \[88, 32\]"),
        (
            put(GATE, lambda x: x.astype(np.int8)),
            "is int8, the parameter layers_1/mlp/gate_proj/kernel float32",
        ),
        (lambda t: t | {"norm.weight": t["model.norm.weight"]}, "norm.weight is there twice"),
        (lambda _: {}, "and 16 more"),
    ],
)
def test_what_does_not_fit_is_named(change: Callable[[Tensors], Tensors], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_hf(change(weights(GROUPED)), GROUPED)
