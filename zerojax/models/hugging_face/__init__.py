"""Hugging Face's folders: ``config.json``, tensor names, and weights of each model type.

Start with ``pretrained``, whose ``from_folder`` finds a folder's model in the table of
``architectures``. In reading order:

- ``config_file``, ``folder``: a :class:`zerojax.models.hugging_face.folder.Format` is a model of
  transformers as data, and reads and writes its folders. ``module_names``: for all types.
- ``gpt2``. ``family``, ``rope_keys`` and ``decoders``: Llama and the types that differ from it in
  options. ``llama``: its functions for arrays in memory.
- ``bart``, ``t5``, ``deberta``, ``bert``.
"""
