"""Pairs of sentences classified by a DeBERTa: `python -m examples.run_glue --help`."""
