"""Second readers, on other libraries than ours: what the bytes of a file say, or an exception if they say nothing.

They are lax, so they prove nothing by accepting; a file that our readers accept must mean the same to them.
"""

import io
import json
import pickle
import struct

import cbor2
import gguf
import numpy as np
from safetensors import deserialize

NAMES = {"f": "F", "i": "I", "u": "U", "c": "C"}


def _array(array):
    if array.dtype == np.dtype("V2"):
        return "BF16", array.shape, array.tobytes()
    little = array.astype(array.dtype.newbyteorder("<"))
    kind = array.dtype.kind
    name = "BOOL" if kind == "b" else NAMES[kind] + str(array.itemsize * 8) if kind in NAMES else array.dtype.str[1:]
    return name, array.shape, little.tobytes()


def safetensors(data):
    return {name: (item["dtype"], tuple(item["shape"]), bytes(item["data"])) for name, item in deserialize(data)}


def npy(data):
    return {"array": _array(np.load(io.BytesIO(data), allow_pickle=False))}


def npz(data):
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        return {name: _array(arrays[name]) for name in arrays.files}


def gguf_reader(path):
    reader = gguf.GGUFReader(path)
    native = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8"}
    swapped = reader.byte_order == "S"
    content = {}
    for tensor in reader.tensors:
        # It gives bfloat16 as plain bytes.
        raw = tensor.data.view(np.uint16) if tensor.tensor_type.name == "BF16" else tensor.data
        raw = raw.byteswap() if swapped and raw.itemsize > 1 else raw
        shape = tuple(int(size) for size in tensor.shape[::-1])
        kind = tensor.tensor_type.name
        content[tensor.name] = (kind if kind in native or not swapped else f"{kind}:be", shape, raw.tobytes())
    return content


def tinygpt(data):
    length = struct.unpack("<I", data[8:12])[0]
    header, body = json.loads(data[12 : 12 + length]), data[16 + length :]
    # The rule of TinyGPTHeader.bodyLayout.
    half = header.get("weightDtype", "fp32") == "fp16" or not header.get("includesOptimizerState", True)
    content, position = {}, 0
    for entry in header["manifest"]:
        name, shape = entry["name"], tuple(entry["shape"])
        embedding = name in ("token_embedding.weight", "position_embedding.weight")
        turned = len(shape) == 2 and name.endswith(".weight") and not embedding
        for suffix in ("",) if half else ("", ".m", ".v"):
            position = 2 * entry["floatOffset"] if half else position
            array = np.frombuffer(body, "<f2" if half else "<f4", int(np.prod(shape, dtype=np.int64)), position)
            position += array.nbytes
            array = array.reshape(shape[::-1]).T if turned else array
            content[name + suffix] = ("F16" if half else "F32", shape, array.tobytes())
    return content


def burnpack(data):
    """Read one record of exact length: the data section is its end, and must start at one of two places."""
    length = struct.unpack("<I", data[6:10])[0]
    entries = cbor2.loads(data[10 : 10 + length])["tensors"]
    stop = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    base = len(data) - stop if entries else 10 + length
    assert base in (10 + length, -(-(10 + length) // 256) * 256)
    content = {}
    for name, entry in entries.items():
        start, stop = entry["data_offsets"]
        kind = entry["dtype"]
        kind = "BOOL" if kind in ("Bool", {"Bool": "Native"}) else kind
        content[name] = (kind, tuple(entry["shape"]), data[base + start : base + stop])
    return content


class _Recorder:
    """Stands in for whatever a pickle names."""

    def __init__(self, path):
        self.path = path

    def __call__(self, *args):
        if self.path == "collections.OrderedDict":
            return dict(*args)
        return (self.path, args)


class _Unpickler(pickle.Unpickler):
    """The unpickler in C, naming instead of importing, with storages by their ids."""

    def find_class(self, module, name):
        return _Recorder(f"{module}.{name}")

    def persistent_load(self, identity):
        return identity


TORCH = {"FloatStorage": ("F32", "f4"), "LongStorage": ("I64", "i8"), "BFloat16Storage": ("BF16", "u2"),
         "DoubleStorage": ("F64", "f8"), "HalfStorage": ("F16", "f2"), "IntStorage": ("I32", "i4"),
         "ShortStorage": ("I16", "i2"), "CharStorage": ("I8", "i1"), "ByteStorage": ("U8", "u1"),
         "BoolStorage": ("BOOL", "u1")}  # fmt: skip


def torch_legacy(data):
    """Read a legacy file whose value is one flat dict of tensors."""
    file = io.BytesIO(data)
    _, _, _, value, keys = (_Unpickler(file).load() for _ in range(5))
    kinds = {}
    for item in value.values():
        if isinstance(item, tuple) and item[0] == "torch._utils._rebuild_tensor_v2":
            reference = item[1][0]
            kinds[reference[2]] = TORCH[reference[1].path.split(".")[-1]]
    storages = {}
    for key in keys:
        (number,) = struct.unpack("<q", file.read(8))
        storages[key] = np.frombuffer(file.read(number * np.dtype(kinds[key][1]).itemsize), "<" + kinds[key][1])
    content = {}
    for name, item in value.items():
        if isinstance(item, tuple) and item[0] == "torch._utils._rebuild_tensor_v2":
            reference, offset, shape, strides = item[1][:4]
            index = offset + sum(
                (np.arange(size).reshape([-1 if axis == at else 1 for at in range(len(shape))]) * step)
                for axis, (size, step) in enumerate(zip(shape, strides, strict=True))
            )
            array = storages[reference[2]][np.broadcast_to(index, shape)]
            content[str(name)] = (kinds[reference[2]][0], tuple(shape), array.tobytes())
    return content
