"""What holds for every format: what was written is read, damage is refused, and nothing is ever misread."""

import numpy as np
import pytest
from damage import content, extensions, flips, refused_everywhere, refused_when_cut
from samples import SAMPLES

from mlxdet.formats import FormatError, content_digest, open_checkpoint

FORMATS = {kind: kind.split("-")[0] if kind != "torch-legacy" else kind for kind in SAMPLES}


@pytest.fixture(params=SAMPLES)
def kind(request):
    return request.param


def test_what_was_written_is_read(kind, tmp_path):
    path = tmp_path / "no-extension"
    path.write_bytes(SAMPLES[kind].data)
    checkpoint = open_checkpoint(path)
    assert checkpoint.format == FORMATS[kind] and checkpoint.path == path
    assert content(checkpoint.tensors) == SAMPLES[kind].content
    assert list(checkpoint.tensors) == sorted(checkpoint.tensors) and checkpoint.unread == ()
    checkpoint.verify()
    for tensor in checkpoint.tensors.values():
        assert tensor.data.dtype == np.uint8 and tensor.data.ndim == 1


def test_the_name_of_the_file_does_not_matter(kind, tmp_path):
    digests = set()
    for name in ("a.safetensors", "b.pth", "c.bin", "d.npz", "e.json", "f.zip"):
        path = tmp_path / name
        path.write_bytes(SAMPLES[kind].data)
        digests.add(content_digest(open_checkpoint(path).tensors))
    assert len(digests) == 1


def test_truncation_at_every_byte_is_refused(kind, tmp_path):
    refused_when_cut(tmp_path / "m", SAMPLES[kind].data)


def test_any_added_byte_is_refused(kind, tmp_path):
    assert refused_everywhere(tmp_path / "m", extensions(SAMPLES[kind].data)) == 8


def test_a_flipped_bit_is_refused_or_read_as_it_stands(kind, tmp_path):
    """Every bit of a short header, every third or more of a long one; an odd step spares no bit of a byte."""
    sample, path = SAMPLES[kind], tmp_path / "m"
    changed = 0
    for bit, got in flips(path, sample.data, 0, sample.header, every=sample.header // 300 | 1):
        if got is None or got == sample.content:
            continue
        changed += 1
        assert sample.oracle, f"bit {bit} changed the content unseen"
        expected = sample.oracle(path if kind.startswith("gguf") else path.read_bytes())
        assert got == expected, f"bit {bit}"
    # Without a checksum a changed name is just another name: so some are accepted, and were compared.
    assert (changed > 0) == bool(sample.oracle)


def test_a_flipped_bit_of_the_data_is_seen_or_refused(kind, tmp_path):
    sample = SAMPLES[kind]
    for bit, got in flips(tmp_path / "m", sample.data, sample.header, every=5):
        assert got != sample.content, f"bit {bit}"
        if got is None:
            continue
        before, after = (b"".join(parts[name][2] for name in sorted(parts)) for parts in (sample.content, got))
        different = np.frombuffer(before, np.uint8) ^ np.frombuffer(after, np.uint8)
        # One bit, or two in a tensor that another shares its storage with.
        assert 1 <= int(np.bitwise_count(different).sum()) <= (2 if kind == "torch-legacy" else 1)


def test_a_swapped_pair_of_tensors_is_seen(tmp_path):
    """Two tensors of one shape that change places give another content, whatever the format."""
    import writers

    a, b = (np.arange(4, dtype=np.float32) + k for k in range(2))
    for number, pair in enumerate([{"a": a, "b": b}, {"a": b, "b": a}]):
        (tmp_path / f"{number}").write_bytes(
            writers.burnpack([(name, "F32", (4,), array.tobytes(), None) for name, array in pair.items()])
        )
    one, two = (open_checkpoint(tmp_path / name).tensors for name in "01")
    assert content_digest(one) != content_digest(two)


@pytest.mark.parametrize(
    "data", [b"x", b"hello world\n" * 50, bytes(1000), b"\x80\x04K\x01.", b"{}", b'{"a": 1}', b"PK"]
)
def test_what_is_no_checkpoint_is_refused(data, tmp_path):
    (tmp_path / "m").write_bytes(data)
    with pytest.raises(FormatError, match=r"m: is (not a checkpoint|a bare Python pickle)"):
        open_checkpoint(tmp_path / "m")


def test_the_oldest_torch_files_are_named(tmp_path):
    (tmp_path / "m").write_bytes(bytes(257) + b"ustar" + bytes(300))
    with pytest.raises(FormatError, match="tar archive"):
        open_checkpoint(tmp_path / "m")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    import os

    os.mkfifo(tmp_path / "m")
    with pytest.raises(FormatError, match="not a regular file"):
        open_checkpoint(tmp_path / "m")
