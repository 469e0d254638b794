"""A writer of PyTorch's two file formats without PyTorch: pickles that name its functions, and storages."""

import collections
import io
import pickle
import struct
from typing import ClassVar

import writers

STORAGES = {"<f4": "FloatStorage", "<f8": "DoubleStorage", "<f2": "HalfStorage", "<i8": "LongStorage",
            "<i4": "IntStorage", "<i2": "ShortStorage", "|i1": "CharStorage", "|u1": "ByteStorage",
            "|b1": "BoolStorage", "<c8": "ComplexFloatStorage", "<c16": "ComplexDoubleStorage"}  # fmt: skip
MAGIC = 0x1950A86A20F9469CFC6C


class Global:
    """A class or function by name: pickled as that name."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Make:
    """Pickled as the call of a global with arguments, and with a state if there is one."""

    def __init__(self, module, name, *args, state=None, items=None, appended=None):
        self.call = (Global(module, name), args, state, appended, items)


class Reference:
    """Pickled as a persistent id."""

    def __init__(self, identity):
        self.identity = identity


class Pickler(pickle._Pickler):
    """The pickler in Python, taught to write names of things that are not there."""

    dispatch: ClassVar[dict] = dict(pickle._Pickler.dispatch)

    def persistent_id(self, value):
        return value.identity if isinstance(value, Reference) else None

    def save_name(self, value):
        self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        self.memoize(value)

    def save_make(self, value):
        function, args, state, appended, items = value.call
        self.save(function)
        self.save(tuple(args))
        self.write(pickle.REDUCE)
        self.memoize(value)
        if appended is not None:
            self._batch_appends(iter(appended))
        if items is not None:
            self._batch_setitems(iter(items.items()))
        if state is not None:
            self.save(state)
            self.write(pickle.BUILD)

    dispatch[Global] = save_name
    dispatch[Make] = save_make


def dumps(value, protocol=2):
    """Return the pickle of `value`."""
    file = io.BytesIO()
    Pickler(file, protocol).dump(value)
    return file.getvalue()


class Store:
    """The storages of a file; hands out tensors on them."""

    def __init__(self):
        self.data: dict[str, tuple[str, bytes, int]] = {}

    def storage(self, array, kind=None, key=None, swap=False, view=None):
        """Keep the bytes of a flat array as a storage of the class `kind` and return a reference to it."""
        key = str(len(self.data)) if key is None else key
        kind = kind or STORAGES[array.dtype.str]
        numel = array.nbytes if kind == "UntypedStorage" else array.size
        raw = array.byteswap().tobytes() if swap else array.tobytes()
        self.data[key] = (kind, raw, numel)
        module = "torch.storage" if kind == "UntypedStorage" else "torch"
        identity = ("storage", Global(module, kind), key, "cpu", numel)
        return Reference(identity if view is None else (*identity, view))

    def tensor(self, array, kind=None, swap=False):
        """Return a whole, contiguous tensor on a storage of its own."""
        strides, step = [], 1
        for size in reversed(array.shape):
            strides.insert(0, step)
            step *= size
        return window(self.storage(array.reshape(-1), kind, swap=swap), 0, array.shape, tuple(strides))


def window(reference, offset, shape, strides, dtype=None, extra=()):
    """Return a tensor: a strided window on a storage."""
    common = (reference, offset, tuple(shape), tuple(strides), False, collections.OrderedDict())
    if dtype is not None:
        return Make("torch._utils", "_rebuild_tensor_v3", *common, Global("torch", dtype), *extra)
    return Make("torch._utils", "_rebuild_tensor_v2", *common, *extra)


def torch_zip(value, store, root="archive", order=b"little", protocol=2, extra=(), pkl=None):
    """Return what torch.save writes since version 1.6."""
    members = {f"{root}/data.pkl": dumps(value, protocol) if pkl is None else pkl, f"{root}/.format_version": b"1"}
    if order is not None:
        members[f"{root}/byteorder"] = order
    members.update({f"{root}/data/{key}": raw for key, (_, raw, _) in store.data.items()})
    members[f"{root}/version"] = b"3\n"
    members.update(extra)
    return writers.archive(members)


def torch_legacy(value, store, protocol=2, keys=None, little=True):
    """Return what torch.save wrote before version 1.6."""
    system = {"protocol_version": 1001, "little_endian": little, "type_sizes": {"short": 2, "int": 4, "long": 4}}
    keys = sorted(store.data) if keys is None else keys
    out = b"".join(dumps(part, protocol) for part in (MAGIC, 1001, system, value, keys))
    for key in keys:
        _, raw, numel = store.data[key]
        out += struct.pack("<q", numel) + raw
    return out
