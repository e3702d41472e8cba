"""A GPT trained as a byte-level language model: `python -m examples.run_clm --help`."""
