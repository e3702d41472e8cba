"""Hugging Face's Llama weights as parameters of `zerojax.models.llama`, and back.

Folders are read and written as by `zerojax.models.hugging_face.gpt2`:

>>> import jax, jax.numpy as jnp, tempfile
>>> from zerojax.models.llama import SIZES, Llama, LlamaConfig
>>> config = LlamaConfig(**SIZES["llama-tiny"])
>>> tokens = jnp.zeros((1, 8), jnp.int32)
>>> fresh = Llama(config).init(jax.random.key(1), tokens)["params"]
>>> with tempfile.TemporaryDirectory() as folder:
...     save(fresh, config, folder)
...     model = Llama(read_config(folder))
...     params = load(folder, model.config)
>>> params["layers_0"]["mlp"]["gate_proj"]["kernel"].shape                 # [in, out] in flax
(32, 96)

>>> config = config_from_hf({"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2})
>>> config.n_embd, config.n_inner, config.kv_heads      # as in transformers if a key is missing
(64, 11008, 4)
>>> config_from_hf(config_to_hf(config)) == config
True
"""

from zerojax.models.hugging_face.decoders import LLAMA

FORMAT = LLAMA[0]

config_from_hf, config_to_hf, names = FORMAT.from_hf, FORMAT.to_hf, FORMAT.names
load, save, read_config = FORMAT.load, FORMAT.save, FORMAT.read_config
export_names = FORMAT.export_names
