"""Small writers of the formats under test: they put down what they are told, also what no honest writer would."""

import json
import struct
import zipfile
from io import BytesIO

import cbor2
import numpy as np


def npy(array, descr=None, fortran=None, shape=None, version=(1, 0), pad=True):
    """Return an npy file; `descr`, `fortran` and `shape` override what the array says."""
    header = {
        "descr": descr or array.dtype.str,
        "fortran_order": bool(array.flags.f_contiguous and not array.flags.c_contiguous)
        if fortran is None
        else fortran,
        "shape": array.shape if shape is None else shape,
    }
    text = repr(header).encode()
    width = 2 if version == (1, 0) else 4
    start = 8 + width
    text += b" " * (-(start + len(text) + 1) % 64 if pad else 0) + b"\n"
    head = b"\x93NUMPY" + bytes(version) + len(text).to_bytes(width, "little") + text
    return head + array.tobytes("A")


def archive(members, compress=False):
    """Return a zip archive of (name, bytes) pairs, or of a dict."""
    file = BytesIO()
    method = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    with zipfile.ZipFile(file, "w", method) as target:
        for name, data in members.items() if isinstance(members, dict) else members:
            target.writestr(zipfile.ZipInfo(name), data, method)
    return file.getvalue()


def streamed_archive(members):
    """Return a zip archive whose members are followed by their sizes, as one written to a pipe."""

    class Pipe(BytesIO):
        def seekable(self):
            return False

        def seek(self, *_):
            raise OSError

    file = Pipe()
    with zipfile.ZipFile(file, "w") as target:
        for name, data in members.items():
            with target.open(name, "w") as member:
                member.write(data)
    return file.getvalue()


GGUF_SCALARS = {"u8": (0, "B"), "i8": (1, "b"), "u16": (2, "H"), "i16": (3, "h"), "u32": (4, "I"), "i32": (5, "i"),
                "f32": (6, "f"), "bool": (7, "B"), "u64": (10, "Q"), "i64": (11, "q"), "f64": (12, "d")}  # fmt: skip


def gguf(tensors=(), keys=(), version=3, order="<", align=32, tail=True, offsets=None, counts=None):
    """Return a GGUF file of (name, shape, ggml type, bytes) tensors and (name, type, value) keys.

    A value of type "str" is text; ("array", type) takes a list. `offsets` and `counts` override the honest ones.
    """

    def number(code, value):
        return struct.pack(order + code, value)

    def text(value):
        raw = value if isinstance(value, bytes) else value.encode()
        return number("Q", len(raw)) + raw

    def value(kind, item):
        if kind == "str":
            return text(item)
        if isinstance(kind, tuple):
            return number("I", code(kind[1])) + number("Q", len(item)) + b"".join(value(kind[1], part) for part in item)
        return number(GGUF_SCALARS[kind][1], item)

    def code(kind):
        return 8 if kind == "str" else 9 if isinstance(kind, tuple) else GGUF_SCALARS[kind][0]

    counts = counts or (len(tensors), len(keys))
    out = b"GGUF" + number("I", version) + number("Q", counts[0]) + number("Q", counts[1])
    for name, kind, item in keys:
        out += text(name) + number("I", code(kind)) + value(kind, item)
    position, body = 0, b""
    for index, (name, shape, kind, data) in enumerate(tensors):
        body += bytes(-len(body) % align)
        position = len(body)
        body += data
        out += text(name) + number("I", len(shape)) + b"".join(number("Q", size) for size in reversed(shape))
        out += number("I", kind) + number("Q", position if offsets is None else offsets[index])
    if tail:
        body += bytes(-len(body) % align)
    return out + bytes(-len(out) % align) + body if tensors or tail else out


def tinygpt(tensors, step=7, moments=True, header=None, **fields):
    """Return a .tinygpt file of name -> array, moments (if any) of 0.5 and 0.25 times the weights.

    Two-dimensional `.weight`s but the embeddings are laid down transposed, as PostTrainLLM does.
    """
    entries, offset, body = [], 0, b""
    for name, array in tensors.items():
        entries.append({"name": name, "shape": list(array.shape), "floatOffset": offset})
        offset += array.size
        embedding = name in ("token_embedding.weight", "position_embedding.weight")
        stored = array.T if array.ndim == 2 and name.endswith(".weight") and not embedding else array
        if moments:
            body += b"".join((stored * np.float32(scale)).astype("<f4").tobytes() for scale in (1, 0.5, 0.25))
        else:
            body += stored.astype("<f2").tobytes()
    kind = {} if moments else {"weightDtype": "fp16", "includesOptimizerState": False}
    content = {"config": {"layers": 1}, "manifest": entries, "savedAt": "now", **kind, **fields}
    encoded = json.dumps(content, sort_keys=True).encode() if header is None else header
    return b"TGPT" + struct.pack("<II", 2, len(encoded)) + encoded + struct.pack("<i", step) + body


def burnpack(tensors, metadata=None, scalars=None, layout="aligned", version=1, edit=None, length=None):
    """Return a burnpack record of (name, dtype, shape, bytes, param_id or None), in this order in the file.

    `edit` changes the metadata before it is written; cbor2 writes it, so that our reader meets another implementation.
    """
    align = 256 if layout == "aligned" else 1
    entries, body = {}, b""
    for name, dtype, shape, data, param_id in tensors:
        body += bytes(-len(body) % align)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(body), len(body) + len(data)]}
        if param_id is not None:
            entries[name]["param_id"] = param_id
        body += data
    root = {"tensors": dict(sorted(entries.items()))}
    if metadata:
        root["metadata"] = dict(sorted(metadata.items()))
    if scalars:
        root["scalars"] = dict(sorted(scalars.items()))
    if edit:
        edit(root)
    encoded = root if isinstance(root, bytes) else cbor2.dumps(root)
    head = b"NRUB" + struct.pack("<HI", version, len(encoded) if length is None else length) + encoded
    return head + bytes(-len(head) % align) + body
