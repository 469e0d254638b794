"""The content digest: equal for equal content, different for any difference in name, dtype, shape or bytes."""

import hashlib

import numpy as np
import pytest

from mlxdet.formats.digest import content_digest
from mlxdet.formats.tensor import Tensor, from_numpy


def raw(dtype, shape, data=b""):
    return Tensor(dtype, shape, np.frombuffer(data, np.uint8))


BASE = {"a": raw("F32", (2,), b"12345678"), "b": raw("U8", (0, 3))}

OTHERS = {
    "name": {"c": BASE["a"], "b": BASE["b"]},
    "dtype": {"a": raw("I32", (2,), b"12345678"), "b": BASE["b"]},
    "shape": {"a": raw("F32", (2, 1), b"12345678"), "b": BASE["b"]},
    "empty shape": {"a": BASE["a"], "b": raw("U8", (3, 0))},
    "bit": {"a": raw("F32", (2,), b"12345679"), "b": BASE["b"]},
    "missing": {"a": BASE["a"]},
    "extra": {**BASE, "c": raw("F32", ())},
    "swapped": {"a": BASE["b"], "b": BASE["a"]},
    "moved border": {"aF": raw("32", (2,), b"12345678"), "b": BASE["b"]},
    "nothing": {},
}


@pytest.mark.parametrize("kind", OTHERS)
def test_any_difference_in_content_changes_the_digest(kind):
    assert content_digest(OTHERS[kind]) != content_digest(BASE)


def test_all_contents_have_different_digests():
    assert len({content_digest(content) for content in [BASE, *OTHERS.values()]}) == len(OTHERS) + 1


def test_order_and_memory_layout_do_not_matter():
    strided = Tensor("F32", (2,), np.frombuffer(b"1x2x3x4x5x6x7x8x", np.uint8)[::2])
    assert content_digest({"b": BASE["b"], "a": strided}) == content_digest(BASE)


def test_the_encoding_is_fixed():
    # Written out by hand, so that a change of the encoding cannot pass unseen: digests are kept in files.
    def number(value):
        return value.to_bytes(8, "little")

    message = b"mlxdet tensors 1\n" + number(1)
    message += number(2) + "é".encode() + number(3) + b"F32" + number(2) + number(1) + number(2) + number(8)
    message += np.array([1.5, -2], "<f4").tobytes()
    expected = hashlib.blake2b(message, digest_size=32).hexdigest()
    assert content_digest({"é": from_numpy(np.array([[1.5, -2]], np.float32))}) == expected
