"""Tensor: raw bytes in, the same bits out."""

import ml_dtypes
import numpy as np
import pytest

from mlxdet.formats.tensor import BITS, NUMPY, DeferredTensor, Tensor, from_numpy


@pytest.mark.parametrize("code", ["f8", "f4", "f2", "c8", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "?"])
@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (2, 3, 4)])
def test_numpy_arrays_come_back_with_the_same_bits(code, order, shape):
    raw = np.random.default_rng(1).integers(0, 2, (*shape, np.dtype(code).itemsize), dtype=np.uint8)
    array = raw.reshape(-1).view(order + code).reshape(shape).copy(order="F")
    tensor = from_numpy(array)
    back = tensor.to_numpy()
    assert tensor.shape == shape and tensor.data.dtype == np.uint8 and tensor.data.ndim == 1
    assert back.dtype == np.dtype("<" + code) and back.shape == shape
    assert back.tobytes() == array.astype("<" + code).tobytes() == tensor.data.tobytes()
    assert BITS[tensor.dtype] * array.size == 8 * tensor.data.size


@pytest.mark.parametrize(
    ("name", "kind"),
    [("BF16", ml_dtypes.bfloat16), ("F8_E4M3", ml_dtypes.float8_e4m3fn), ("F8_E5M2", ml_dtypes.float8_e5m2)],
)
def test_dtypes_unknown_to_numpy_travel_as_bits(name, kind):
    values = np.array([0.0, -0.0, 1.0, -2.5, np.nan], kind)
    bits = values.view(np.uint16 if name == "BF16" else np.uint8)
    tensor = from_numpy(bits, name)
    assert tensor.dtype == name
    assert tensor.to_numpy().view(kind).tobytes() == values.tobytes()


def test_wrong_widths_and_unknown_dtypes_are_refused():
    with pytest.raises(ValueError, match="width"):
        from_numpy(np.zeros(3, np.float32), "BF16")
    with pytest.raises(ValueError, match="no checkpoint dtype"):
        from_numpy(np.array(["a"]))
    with pytest.raises(ValueError, match="Q4_0"):
        Tensor("Q4_0", (32,), np.zeros(18, np.uint8)).to_numpy()
    with pytest.raises(ValueError, match="F4"):
        Tensor("F4", (2,), np.zeros(1, np.uint8)).to_numpy()


def test_deferred_bytes_are_made_at_each_reading_and_not_kept():
    made = []

    def read():
        made.append(1)
        return np.zeros(8, np.uint8)

    tensor = DeferredTensor("F32", (2,), read)
    assert (tensor.dtype, tensor.shape, made) == ("F32", (2,), [])
    assert tensor.to_numpy().tolist() == [0, 0] and tensor.data.size == 8
    assert len(made) == 2 and "F32" in repr(tensor) and len(made) == 2


def test_the_tables_agree_on_widths():
    for name, code in NUMPY.items():
        if name in BITS:
            assert np.dtype(code).itemsize * 8 == BITS[name]
