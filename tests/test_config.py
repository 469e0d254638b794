"""One tree: flags, TOML and manifest agree, and nothing unknown or out of bounds gets in."""

import dataclasses
import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdet.config import (
    FIELDS,
    PRESETS,
    ROLLBACK,
    ROWS,
    SPIKES,
    TUNE,
    TrainConfig,
    decides,
    differences,
    flag,
    from_dict,
    from_toml,
    to_toml,
)
from mlxdet.errors import UsageError


def test_presets_are_the_published_shapes():
    table = {"nano": (2, 64, 2, 64, 256), "tiny": (4, 128, 4, 128, 512), "small": (6, 192, 6, 256, 768),
             "medium": (12, 256, 8, 512, 1024), "large": (24, 512, 8, 1024, 2048)}  # fmt: skip
    assert {k: tuple(v.values()) for k, v in PRESETS.items()} == table
    for name, shape in table.items():
        m = TrainConfig.of(preset=name).resolve().model
        assert (m.layers, m.width, m.heads, m.context, m.mlp) == shape


def test_a_preset_can_be_overridden_one_by_one_and_depth_derives():
    m = TrainConfig.of(preset="nano", heads=4, mlp=99).resolve().model
    assert (m.layers, m.width, m.heads, m.context, m.mlp) == (2, 64, 4, 64, 99)
    m = TrainConfig.of(preset="nano", depth=5).resolve().model
    assert (m.layers, m.width, m.heads, m.context, m.mlp) == (5, 320, 5, 64, 1280)
    m = TrainConfig.of(preset="nano", depth=5, width=640).resolve().model
    assert (m.layers, m.width, m.heads) == (5, 640, 5)


def test_every_field_has_help_and_a_default_that_is_valid():
    for f in FIELDS.values():
        assert f.help.endswith(".") and f.help[0] in f.help.upper() + f.help
        if f.default is not None:
            TrainConfig.of(**{f.name: f.default})


def test_seeds_default_to_the_one_seed_and_zero_is_a_seed():
    s = TrainConfig.of(seed=9).resolve().seeds
    assert (s.init_seed, s.data_seed) == (9, 9)
    s = TrainConfig.of(seed=9, init_seed=0).resolve().seeds
    assert (s.init_seed, s.data_seed) == (0, 9)


def test_toml_round_trip(tmp_path):
    config = TrainConfig.of(
        seed=(1 << 64) - 1, data=['a "quoted"\nname', "é\x7f\x1f"], dropout=0.25, eps=1e-12, tokenizer="t.model"
    ).resolve()
    path = tmp_path / "c.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    assert from_toml(path) == config
    assert from_toml(path).resolve() == config
    assert from_dict(config.as_dict(), "x") == config


BAD_TOML = {
    "[model]\npreset = 'huge'": "[model] preset: 'huge' is not one of nano, tiny",
    "[model]\nlayer = 2": "unknown key 'layer' in [model]",
    "[model]\nsteps = 2": "unknown key 'steps' in [model]; it belongs under [optim]",
    "steps = 2": "unknown key 'steps'; it belongs under [optim]",
    "[training]\nsteps = 2": "unknown key 'training'",
    "model = 3": "[model] must be a table",
    "[optim]\nmax_lr = '1e-5'": "[optim] max_lr: '1e-5' is not a number",
    "[optim]\nsteps = 1.5": "[optim] steps: 1.5 is not a whole number",
    "[optim]\nsteps = true": "[optim] steps: True is not a whole number",
    "[optim]\nsteps = 0": "[optim] steps: 0 is too small",
    "[optim]\nmax_lr = nan": "is not a finite number",
    "[optim]\nmax_lr = inf": "is not a finite number",
    "[model]\ndropout = 1.0": "must be below 1",
    "[seeds]\nseed = -1": "out of range",
    "[seeds]\nseed = 1.0": "is not a seed",
    "[seeds]\nseed = true": "is not a seed",
    "[data]\ndata = [1]": "is not a path or a list of paths",
    "[data]\nval_fraction = 1": "too large",
    "[optim": "not a TOML file",
    "[optim]\nmax_lr = " + "9" * 400: "is not a number",
}


@pytest.mark.parametrize("text", BAD_TOML)
def test_a_bad_file_is_one_line_that_names_file_and_key(tmp_path, text):
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        from_toml(path)
    said = str(caught.value)
    assert BAD_TOML[text] in said and said.startswith(f"{path}: ") and "\n" not in said


def test_small_learning_rates_are_numbers(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[optim]\nmax_lr = 1e-5\nmin_lr = 0\n")
    assert (from_toml(path).optim.max_lr, from_toml(path).optim.min_lr) == (1e-5, 0.0)


def test_unreadable_files_are_named(tmp_path):
    for path in (tmp_path / "none.toml", tmp_path):
        with pytest.raises(UsageError, match="cannot read the config"):
            from_toml(path)
    (tmp_path / "latin.toml").write_bytes(b"[data]\ndata = '\xe9'")
    with pytest.raises(UsageError, match="not a TOML file"):
        from_toml(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    "values, said",
    [
        ({"width": 65, "heads": 2}, "--width: 65 is not a multiple of --heads 2"),
        ({"min_lr": 0.1}, "--min-lr: 0.1 is above --max-lr"),
        ({"steps": 5, "warmup": 6}, "--warmup: 6 steps"),
        ({"steps": 10, "warmup": 5, "schedule": "wsd", "decay_steps": 6}, "--decay-steps: warmup 5 + decay 6"),
    ],
)
def test_values_that_do_not_fit_together(values, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        TrainConfig.of(**values).resolve()


def test_unknown_names_are_refused_in_python_too():
    with pytest.raises(UsageError, match="unknown setting 'lr'"):
        TrainConfig.of(lr=1)


def test_defaults_fit_any_number_of_steps():
    for steps, schedule in itertools.product((1, 2, 3, 9, 10, 11, 40, 5000), ("cosine", "wsd", "constant")):
        TrainConfig.of(steps=steps, schedule=schedule).resolve()


def test_what_changes_comfort_only_is_no_difference():
    config = TrainConfig.of(preset="nano").resolve()
    for f in FIELDS.values():
        other = {int: 3, float: 0.37, str: "x", tuple: ("y",), bool: True}[f.kind] if not f.choices else f.choices[-1]
        if f.name in ("beta1", "beta2"):
            other = 0.5
        changed = dataclasses.replace(
            config, **{f.section: dataclasses.replace(getattr(config, f.section), **{f.name: other})}
        )
        names = [name for name, _, _ in differences(config, changed)]
        assert names == ([f.name] if decides(config, f.name) or decides(changed, f.name) else []), f.name
        assert decides(config, f.name) == (not f.comfort and f.name not in (*SPIKES, *TUNE, *ROWS)), f.name


def test_what_a_spike_policy_needs_decides_with_it_and_else_does_not():
    for policy, deciding in {
        "warn": set(),
        "stop": set(),
        "skip": set(SPIKES) - set(ROLLBACK),
        "rollback": set(SPIKES),
    }.items():
        config = TrainConfig.of(on_spike=policy).resolve()
        assert {name for name in SPIKES if decides(config, name)} == deciding, policy
    assert differences(TrainConfig.of(on_spike="warn"), TrainConfig.of(on_spike="stop")) == []
    assert differences(TrainConfig.of(on_spike="warn"), TrainConfig.of(on_spike="skip")) == [
        ("on_spike", "warn", "skip")
    ]
    with pytest.raises(UsageError, match="--no-spike-detect"):
        TrainConfig.of(on_spike="skip", spike_detect=False).resolve()


def test_flags_are_named_after_fields():
    assert flag("max_lr") == "--max-lr"


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda s: st.lists(s, max_size=3) | st.dictionaries(st.sampled_from([*FIELDS, "model", "optim", "x"]), s, max_size=3),
                    max_leaves=8))  # fmt: skip
def test_any_tree_is_read_or_refused_cleanly(tree):
    try:
        config = from_dict(tree if isinstance(tree, dict) else {"model": tree}, "f")
    except UsageError:
        return
    assert isinstance(config, TrainConfig)
