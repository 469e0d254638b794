""".tinygpt: both bodies, the transposed weights, and the errors its own readers name."""

import json
import struct

import numpy as np
import pytest
import writers
from damage import content

from mlxdet.formats import FormatError, open_checkpoint

RNG = np.random.default_rng(29)
MODEL = {
    "token_embedding.weight": RNG.standard_normal((7, 4)).astype(np.float32),
    "position_embedding.weight": RNG.standard_normal((5, 4)).astype(np.float32),
    "ln_final.weight": RNG.standard_normal(4).astype(np.float32),
    "blocks.0.attn.q_proj.weight": RNG.standard_normal((4, 4)).astype(np.float32),
    "blocks.0.mlp.fc_in.weight": RNG.standard_normal((6, 4)).astype(np.float32),
    "blocks.0.mlp.fc_in.bias": RNG.standard_normal(6).astype(np.float32),
}


def opened(path, data):
    path.write_bytes(data)
    return open_checkpoint(path)


def test_weights_and_moments_have_the_shape_and_order_the_manifest_says(tmp_path):
    checkpoint = opened(tmp_path / "m", writers.tinygpt(MODEL, step=-3))
    assert len(checkpoint.tensors) == 18
    for name, array in MODEL.items():
        for suffix, scale in (("", 1), (".m", 0.5), (".v", 0.25)):
            tensor = checkpoint.tensors[name + suffix]
            assert tensor.dtype == "F32" and tensor.to_numpy().tolist() == (array * np.float32(scale)).tolist()
    assert checkpoint.metadata == {"config": {"layers": 1}, "savedAt": "now", "step": -3}


def test_linear_weights_lie_transposed_in_the_file(tmp_path):
    """Square ones too, where the mistake would pass every check of sizes."""
    data = writers.tinygpt(MODEL)
    square = MODEL["blocks.0.attn.q_proj.weight"]
    assert square.T.tobytes() in data and square.tobytes() not in data
    assert MODEL["token_embedding.weight"].tobytes() in data


def test_inference_files_are_float16_by_offset(tmp_path):
    checkpoint = opened(tmp_path / "m", writers.tinygpt(MODEL, moments=False))
    assert content(checkpoint.tensors) == {
        name: ("F16", array.shape, array.astype(np.float16).tobytes()) for name, array in MODEL.items()
    }


def test_the_time_of_saving_does_not_change_the_content(tmp_path):
    one, two = (opened(tmp_path / time, writers.tinygpt(MODEL, savedAt=time)) for time in ("1", "22"))
    assert content(one.tensors) == content(two.tensors) and one.metadata != two.metadata


def manifest(**changes):
    entries = [{"name": "a", "shape": [2], "floatOffset": 0}, {"name": "b", "shape": [2], "floatOffset": 2}]
    entries[1].update(changes)
    return {"manifest": [{k: v for k, v in entry.items() if v is not None} for entry in entries]}


def inference(body=8, **changes):
    header = {"weightDtype": "fp16", "includesOptimizerState": False, **manifest(**changes)}
    return writers.tinygpt({}, header=json.dumps(header).encode()) + bytes(body)


def training(body=48, **changes):
    return writers.tinygpt({}, header=json.dumps(manifest(**changes)).encode()) + bytes(body)


def test_the_hand_made_files_are_right_when_nothing_is_changed(tmp_path):
    assert len(opened(tmp_path / "m", inference()).tensors) == 2
    assert len(opened(tmp_path / "m", training()).tensors) == 6


BAD = {
    "too small": (b"TGPT\2\0\0\0", "too short"),
    "version 1": (b"TGPT" + struct.pack("<II", 1, 2) + b"{}" + bytes(4), "version 1"),
    "truncated header": (b"TGPT" + struct.pack("<II", 2, 100) + b"{}" + bytes(4), "header of 100 bytes"),
    "not UTF-8": (writers.tinygpt({}, header=b'{"\xff":1}'), "UTF-8"),
    "not JSON": (writers.tinygpt({}, header=b"{nonsense"), "not JSON"),
    "no manifest": (writers.tinygpt({}, header=b'{"config":{}}'), "without a manifest"),
    "key twice": (writers.tinygpt({}, header=b'{"manifest":[],"manifest":[]}'), "twice"),
    "truncated body": (training(body=44), "'b.v': needs .* truncated"),
    "bytes after the body": (training(body=52), "4 bytes after"),
    "truncated weights": (inference(body=6), "'b': needs"),
    "gap": (inference(floatOffset=3, body=10), "'b': leaves a gap"),
    "overlap": (inference(floatOffset=1, body=6), "'b': starts at 2, inside tensor 'a'"),
    "no offset": (inference(floatOffset=None), "'b': has no floatOffset"),
    "negative offset": (inference(floatOffset=-1), "no floatOffset"),
    "same name": (inference(name="a"), "'a': is there twice"),
    "name of a moment": (training(name="a.m"), "'a.m': is there twice"),
    "negative shape": (training(shape=[-2, -1]), "'b': shape"),
    "overflow": (training(shape=[1 << 40, 1 << 40]), "overflows"),
    "nameless": (training(name=7), "no name"),
    "int4": (
        writers.tinygpt({}, header=json.dumps({"weightDtype": "int4", **manifest()}).encode()),
        "'int4' is not known",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_refused_by_name(tmp_path, kind):
    data, message = BAD[kind]
    with pytest.raises(FormatError, match=f"m: .*{message}"):
        opened(tmp_path / "m", data)
