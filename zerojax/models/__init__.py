"""Models in flax, their Hugging Face files, and the names by which commands find models.

A config and tokens come in; logits or losses come out. Devices and shardings enter a model only
through optional fields. Start with :class:`zerojax.models.gpt.GPT`. In reading order:

- ``config``, ``loss``, ``blocks``: what all models share.
- ``gpt``, ``gpt_nnx``, ``llama``: decoders. ``bart``, with ``beam_search``: an encoder-decoder.
  ``deberta``: an encoder that classifies.
- ``layout``, ``tensor_parallel``: activations and parameters over the mesh axes "seq" and "model".
- ``kernels``, ``attention``, ``assumed_attention``: fused layers, and the choice among them.
- ``hugging_face``: weights and configs of transformers. ``tokenizer``: its tokenizers.
- ``registry``, ``names``: models by name, for ``zerojax plan``, ``fit`` and ``estimate``.
"""
