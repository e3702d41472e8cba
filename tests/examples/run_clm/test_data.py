"""Reading, splitting and batching text."""

import numpy as np

from examples.run_clm.data import (
    Batches,
    split,
)


def test_many_documents_are_held_out_unsplit() -> None:
    text = split([b"%03d" % i * 10 for i in range(20)], block_size=8)
    assert bytes(text.held_out) == b"009" * 10 + b"\0" + b"019" * 10 + b"\0"
    assert len(text.train) == 18 * 31
    assert b"009" not in bytes(text.train)


def test_few_documents_are_held_out_at_their_ends() -> None:
    text = split([b"a" * 90 + b"z" * 10, b"b" * 45 + b"y" * 5], block_size=4)
    assert bytes(text.train) == b"a" * 90 + b"\0" + b"b" * 45 + b"\0"
    assert bytes(text.held_out) == b"z" * 10 + b"\0" + b"y" * 5 + b"\0"


def test_batches_depend_on_seed_and_step_alone() -> None:
    stream = np.arange(200, dtype=np.uint8)
    batches = Batches(stream, batch_size=8, block_size=16, seed=3)
    tokens = batches.batch_at(5)["tokens"]
    assert (tokens.shape, tokens.dtype) == ((8, 17), np.int32)
    np.testing.assert_array_equal(np.diff(tokens), 1)
    np.testing.assert_array_equal(tokens, Batches(stream, 8, 16, seed=3).batch_at(5)["tokens"])
    assert not np.array_equal(tokens, batches.batch_at(6)["tokens"])
    assert not np.array_equal(tokens, Batches(stream, 8, 16, seed=4).batch_at(5)["tokens"])


def test_an_epoch_has_each_block_once() -> None:
    batches = Batches(np.arange(8 * 10 + 1, dtype=np.uint8), 3, 10, in_epochs=True)
    assert batches.per_epoch == 2
    epochs = [
        np.concatenate([batches.batch_at(2 * epoch + at)["tokens"][:, 0] for at in range(2)])
        for epoch in range(2)
    ]
    assert all(len({*epoch}) == 6 and not (epoch % 10).any() for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
