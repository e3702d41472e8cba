"""An encoder-decoder trained, and evaluated by BLEU: `python -m examples.run_seq2seq --help`."""
