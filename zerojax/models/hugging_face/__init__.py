"""Hugging Face's folders: ``config.json``, tensor names, and weights of each model type.

Start with ``gpt2``, whose functions ``load``, ``save`` and ``read_config`` are methods of a
:class:`zerojax.models.hugging_face.folder.LanguageModel`; ``llama`` has them too. ``bart`` and
``deberta`` have only configs and names. ``config_file`` and ``module_names`` are shared.
"""
