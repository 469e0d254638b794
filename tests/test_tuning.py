"""What goes together: objectives, rows, adapters and a base; and that runs on text keep their recipe."""

import re

import pytest

from mlxdet.config import (
    ROWS,
    SHAPE,
    TUNE,
    TrainConfig,
    decides,
    differences,
    flag,
    from_toml,
    given_shape,
    to_toml,
    tuned,
)
from mlxdet.data.templates import TEMPLATES
from mlxdet.errors import UsageError
from mlxdet.training.objectives import OBJECTIVES
from mlxdet.training.run import recipe
from mlxdet.tuning import lora_scale

CORPUS = {"digest": "d", "vocab": 256}


def of(**values):
    return TrainConfig.of(**values).resolve()


def test_names_are_those_of_the_code():
    from mlxdet.config import FIELDS

    assert set(FIELDS["template"].choices) == set(TEMPLATES)
    assert FIELDS["objective"].choices == tuple(OBJECTIVES)
    assert flag("base") == "--from"


@pytest.mark.parametrize("name", list(OBJECTIVES))
def test_defaults_are_those_of_the_objective(name):
    t = of(objective=name, base="x").tune
    assert (t.beta, t.gamma) == (OBJECTIVES[name].beta, OBJECTIVES[name].gamma)
    t = of(objective=name, base="x", lora_rank=3, lora_targets=" down,qkv").tune
    assert (t.lora_alpha, t.lora_targets) == (6.0, "qkv,down")
    assert lora_scale(of(objective=name, base="x", lora_rank=4, lora_alpha=2)) == 0.5


REFUSED = [
    ({"objective": "dpo"}, "--objective dpo: compares with a trained run; name it with --from"),
    ({"lora_rank": 2}, "--lora-rank: adapters stand on a trained run; name it with --from"),
    ({"objective": "dpo", "base": "x", "dropout": 0.1}, "--dropout: dpo compares policy and reference"),
    ({"objective": "dpo", "base": "x", "neftune_alpha": 1.0}, "--neftune-alpha: dpo"),
    ({"objective": "dpo", "base": "x", "lora_rank": 2, "lora_dropout": 0.1}, "--lora-dropout: dpo"),
    ({"beta": 0.1}, "--beta: is for dpo, orpo and simpo; the objective is lm"),
    ({"objective": "sft", "beta": 0.1}, "--beta"),
    ({"objective": "orpo", "gamma": 0.1}, "--gamma: is for simpo"),
    ({"packing": True}, "--packing: is for sft"),
    ({"objective": "orpo", "packing": True}, "--packing: is for sft"),
    ({"objective": "simpo", "rows": "io"}, "--rows: is for sft"),
    ({"template": "chatml"}, "--template: is for rows"),
    ({"truncate": True}, "--truncate: is for rows"),
    ({"objective": "sft", "order": "epochs"}, "--order: is for text"),
    ({"lora_alpha": 2.0}, "--lora-alpha: needs --lora-rank"),
    ({"lora_targets": "up"}, "--lora-targets: needs --lora-rank"),
    ({"lora_dropout": 0.5}, "--lora-dropout: needs --lora-rank"),
    ({"base": "x", "lora_rank": 2, "lora_targets": "up,gate"}, "--lora-targets: 'gate' is not a linear map"),
]


@pytest.mark.parametrize(("values", "said"), REFUSED, ids=[said[:30] for _, said in REFUSED])
def test_what_has_no_use_is_refused(values, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        of(**values)


def test_a_resolved_config_resolves_to_itself(tmp_path):
    config = of(objective="simpo", base="x", lora_rank=4, template="llama", truncate=True)
    (tmp_path / "c.toml").write_text(to_toml(config))
    assert config.resolve() == config == from_toml(tmp_path / "c.toml")


def test_a_run_on_text_keeps_the_recipe_it_always_had():
    """The digest of the version before objectives, for the default settings."""
    assert recipe(of(device="cpu"), CORPUS) == "d71ce4d80bcbd32fc3722146fc2a36a1"
    text = of()
    assert not tuned(text) and not any(decides(text, name) for name in (*TUNE, *ROWS))


def test_each_setting_that_decides_is_in_the_recipe():
    config = of(objective="sft", base="x", lora_rank=4)
    assert all(decides(config, name) for name in (*TUNE, *ROWS))
    seen = {recipe(config, CORPUS, "1"), recipe(config, CORPUS, "2")}
    for values in ({"rows": "io"}, {"template": "chatml"}, {"packing": True}, {"truncate": True}, {"lora_alpha": 3.0},
                   {"lora_targets": "up"}, {"lora_dropout": 0.5}, {"lora_rank": 5}, {"objective": "orpo"}):  # fmt: skip
        other = of(**({"objective": "sft", "base": "x", "lora_rank": 4} | values))
        assert differences(config, other)
        seen.add(recipe(other, CORPUS, "1"))
    assert len(seen) == 11
    # Where the base lies is a note.
    assert recipe(of(objective="sft", base="y", lora_rank=4), CORPUS, "1") in seen


def test_the_shape_that_was_asked_for():
    assert given_shape(TrainConfig().model) == {}
    assert given_shape(TrainConfig.of(depth=2, width=8).model) == {"layers": 2, "width": 8, "heads": 2, "mlp": 512}
    assert set(given_shape(TrainConfig.of(preset="nano").model)) == set(SHAPE)
