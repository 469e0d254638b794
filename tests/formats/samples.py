"""One small file of each format, and the content it must be read as."""

from typing import NamedTuple

import numpy as np
import oracles
import torch_writer
import writers
from damage import Content

RNG = np.random.default_rng(3)
W = RNG.standard_normal((3, 5)).astype(np.float32)
B = RNG.standard_normal(5).astype(np.float32)
IDS = np.array([[1, -2], [3, 1 << 40]], np.int64)
FLAGS = np.array([True, False, True])
BF16 = RNG.integers(0, 1 << 16, 16, dtype=np.uint16)
EMPTY = np.zeros((0, 2), np.float32)


class Sample(NamedTuple):
    """A file, its content, where its header ends, and a second reader where no checksum guards the header."""

    data: bytes
    content: Content
    header: int
    oracle: object = None


def _plain(**arrays) -> Content:
    return {name: oracles._array(array) for name, array in arrays.items()}


def npy() -> Sample:
    data = writers.npy(np.asfortranarray(W))
    return Sample(data, _plain(array=W), len(data) - W.nbytes, oracles.npy)


def npz(compress=False) -> Sample:
    arrays = {"w": W, "b": B.astype(">f4"), "ids": np.asfortranarray(IDS), "flag": FLAGS, "empty": EMPTY}
    members = {f"{name}.npy": writers.npy(array) for name, array in arrays.items()}
    members["bf.npy"] = writers.npy(BF16, descr="|V2")
    data = writers.archive(members, compress)
    return Sample(data, {**_plain(**{**arrays, "b": B}), "bf": ("BF16", (16,), BF16.tobytes())}, len(data))


def gguf(order="<") -> Sample:
    quantised = RNG.integers(0, 256, 36, dtype=np.uint8).tobytes()
    suffix = "" if order == "<" else ":be"
    tensors = [
        ("w", W.shape, 0, W.astype(order + "f4").tobytes()),
        ("q", (2, 32), 2, quantised),
        ("bf", (16,), 30, BF16.astype(order + "u2").tobytes()),
    ]
    keys = [("general.name", "str", "small"), ("x", ("array", "u16"), [1, 2]), ("y", "f32", 0.5), ("z", "bool", 1)]
    content = {"w": ("F32", W.shape, W.tobytes()), "q": ("Q4_0" + suffix, (2, 32), quantised),
               "bf": ("BF16", (16,), BF16.tobytes())}  # fmt: skip
    data = writers.gguf(tensors, keys, order=order)
    return Sample(data, content, len(data) - 160, oracles.gguf_reader)


def burnpack(layout="aligned") -> Sample:
    tensors = [
        ("head.weight", "F32", W.shape, W.tobytes(), 1 << 60),
        ("a.bias", "F32", B.shape, B.tobytes(), 5),
        ("ids", "I64", IDS.shape, IDS.tobytes(), None),
        ("flag", {"Bool": "Native"}, FLAGS.shape, FLAGS.tobytes(), None),
    ]
    data = writers.burnpack(tensors, {"producer": "test"}, {"lr": {"Float": 0.5}}, layout)
    content = _plain(**{"head.weight": W, "a.bias": B, "ids": IDS, "flag": FLAGS})
    return Sample(data, content, len(data) - (771 if layout == "aligned" else 115), oracles.burnpack)


def tinygpt(moments=True) -> Sample:
    arrays = {"token_embedding.weight": W, "ln.weight": B, "blocks.0.fc.weight": W + 1}
    data = writers.tinygpt(arrays, moments=moments)
    content: Content = {}
    for name, array in arrays.items():
        if moments:
            for suffix, scale in (("", 1), (".m", 0.5), (".v", 0.25)):
                content[name + suffix] = ("F32", array.shape, (array * np.float32(scale)).tobytes())
        else:
            content[name] = ("F16", array.shape, array.astype(np.float16).tobytes())
    body = sum(len(raw) for _, _, raw in content.values())
    return Sample(data, content, len(data) - body, oracles.tinygpt)


def _torch():
    store = torch_writer.Store()
    value = {
        "w": store.tensor(W),
        "t": torch_writer.window(torch_writer.Reference(("storage", torch_writer.Global("torch", "FloatStorage"), "0",
                                                         "cpu", 15)), 1, (2, 3), (1, 5)),
        "ids": store.tensor(IDS),
        "bf": store.tensor(BF16, "BFloat16Storage"),
        "lr": 0.5,
    }  # fmt: skip
    turned = np.lib.stride_tricks.as_strided(W.reshape(-1)[1:], (2, 3), (4, 20))
    return value, store, {**_plain(w=W, t=turned, ids=IDS), "bf": ("BF16", (16,), BF16.tobytes())}


def torch_zip() -> Sample:
    value, store, content = _torch()
    data = torch_writer.torch_zip(value, store)
    return Sample(data, content, len(data))


def torch_legacy() -> Sample:
    value, store, content = _torch()
    data = torch_writer.torch_legacy(value, store)
    return Sample(
        data, content, len(data) - sum(len(raw) + 8 for _, raw, _ in store.data.values()), oracles.torch_legacy
    )


def safetensors() -> Sample:
    from io import BytesIO

    from mlxdet.formats import Tensor, from_numpy, write_safetensors

    file = BytesIO()
    tensors = {"w": from_numpy(W), "ids": from_numpy(IDS), "q": Tensor("F8_E4M3", (4,), BF16.view(np.uint8)[:4])}
    write_safetensors(file, tensors)
    content = {**_plain(w=W, ids=IDS), "q": ("F8_E4M3", (4,), BF16.tobytes()[:4])}
    data = file.getvalue()
    return Sample(data, content, len(data) - W.nbytes - IDS.nbytes - 4, oracles.safetensors)


SAMPLES = {
    "safetensors": safetensors(),
    "npy": npy(),
    "npz": npz(),
    "npz-compressed": npz(compress=True),
    "gguf": gguf(),
    "gguf-big": gguf(">"),
    "torch": torch_zip(),
    "torch-legacy": torch_legacy(),
    "burnpack": burnpack(),
    "burnpack-packed": burnpack("packed"),
    "tinygpt": tinygpt(),
    "tinygpt-inference": tinygpt(moments=False),
}
