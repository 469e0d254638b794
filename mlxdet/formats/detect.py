"""Which format a file has, by its content: names and extensions lie (`.bin` alone stands for five formats)."""

from collections.abc import Callable

from mlxdet.formats import archive, burnpack, gguf, npy, npz, safetensors, tinygpt, torch_legacy, torch_zip
from mlxdet.formats.checkpoint import Checkpoint
from mlxdet.formats.source import Source


def _read_safetensors(source: Source) -> Checkpoint:
    tensors, metadata = safetensors.parse(source)
    return Checkpoint(source.path, "safetensors", tensors, metadata)


def _read_archive(source: Source) -> Checkpoint:
    members = archive.read_archive(source)
    if torch_zip.matches(members):
        return torch_zip.read(source, members)
    if npz.matches(members):
        return npz.read(source, members)
    raise source.error("is a zip archive, but neither npz nor a PyTorch checkpoint")


# Those with magic bytes first. burnpack is last, for it alone may start after something else.
_FORMATS: tuple[tuple[str, Callable[[Source], bool], Callable[[Source], Checkpoint]], ...] = (
    ("gguf", gguf.looks_like, gguf.read),
    ("tinygpt", tinygpt.looks_like, tinygpt.read),
    ("npy", npy.looks_like, npy.read),
    ("archive", archive.looks_like, _read_archive),
    ("torch-legacy", torch_legacy.looks_like, torch_legacy.read),
    ("safetensors", safetensors.looks_like, _read_safetensors),
    ("burnpack", burnpack.looks_like, burnpack.read),
)


def identify(source: Source) -> str | None:
    """Return the name of the format that `source` starts as, or None if it is no checkpoint of a known format."""
    for name, looks_like, _ in _FORMATS:
        if looks_like(source):
            if name != "archive":
                return name
            members = archive.read_archive(source)
            return "torch" if torch_zip.matches(members) else "npz" if npz.matches(members) else None
    return None


def open_file(source: Source) -> Checkpoint:
    """Return the checkpoint in one file. Raises FormatError."""
    for _, looks_like, read in _FORMATS:
        if looks_like(source):
            return read(source)
    if bytes(source.view[257:262]) == b"ustar":
        raise source.error("is a tar archive, as PyTorch wrote before 0.1.10; load and save it with a newer version")
    if source.view[:1] == b"\x80":
        raise source.error("is a bare Python pickle, which only its own program can read; save its arrays as npz")
    raise source.error("is not a checkpoint of a known format")
