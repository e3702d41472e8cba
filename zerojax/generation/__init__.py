"""Generation of tokens by decoders with a cache."""
