"""Exact token ids and masks, written out by hand. In a byte vocabulary an id is the code of its character."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from mlxdet.data.jsonl import RowError
from mlxdet.data.templates import TEMPLATES, Renderer, Tokens, Turn
from mlxdet.data.tokenizer import ByteTokenizer, load_tokenizer
from mlxdet.errors import UsageError

S, U, A = "system", "user", "assistant"


def turns(*pairs: tuple[str, str]) -> list[Turn]:
    return [Turn(role, text, role == A) for role, text in pairs]


def spelled(tokens: Tokens) -> str:
    """The text, scored tokens in braces: what the mask looks like at a glance."""
    out, inside = "", False
    for char, scored in zip(bytes(tokens.ids.tolist()).decode("latin-1"), tokens.scored.tolist(), strict=True):
        out += ("{" if scored and not inside else "}" if inside and not scored else "") + char
        inside = scored
    return out + ("}" if inside else "")


def render(template: str, *pairs: tuple[str, str]) -> Tokens:
    return Renderer(template, ByteTokenizer()).render(turns(*pairs))


# fmt: off
SINGLE = {
    "plain": ([81, 10, 65, 60, 47, 115, 62], [0, 0, 1, 1, 1, 1, 1]),  # Q \n A < / s >
    "llama": (
        [60, 115, 62, 91, 73, 78, 83, 84, 93, 32, 81, 32, 91, 47, 73, 78, 83, 84, 93, 32, 65, 60, 47, 115, 62],  # <s>[INST] Q [/INST] A</s>
        [0] * 20 + [1] * 5,
    ),
    "chatml": (
        [60, 124, 105, 109, 95, 115, 116, 97, 114, 116, 124, 62, 117, 115, 101, 114, 10, 81,  # <|im_start|>user\nQ
         60, 124, 105, 109, 95, 101, 110, 100, 124, 62, 10,  # <|im_end|>\n
         60, 124, 105, 109, 95, 115, 116, 97, 114, 116, 124, 62, 97, 115, 115, 105, 115, 116, 97, 110, 116, 10,  # <|im_start|>assistant\n
         65, 60, 124, 105, 109, 95, 101, 110, 100, 124, 62],  # A<|im_end|>
        [0] * 51 + [1] * 11,
    ),
}
# fmt: on


@pytest.mark.parametrize("template", TEMPLATES)
def test_single_turn(template: str) -> None:
    got = render(template, (U, "Q"), (A, "A"))
    ids, scored = SINGLE[template]
    assert got.ids.dtype == np.int32 and got.scored.dtype == bool
    assert got.ids.tolist() == ids and got.scored.tolist() == [bool(x) for x in scored]


def shifted(mask: Sequence[int], by: int) -> list[int]:
    return [0] * by + list(mask)[:-by] if by > 0 else list(mask)[-by:] + [0] * -by


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_mask_that_is_off_by_one_is_seen(template: str, by: int) -> None:
    """Negative control. One late is the rival's fault: the first token of the answer is never trained."""
    got = render(template, (U, "Q"), (A, "A"))
    first, last = np.flatnonzero(got.scored)[[0, -1]]
    answer = "A" + TEMPLATES[template].end
    assert (chr(got.ids[first]), chr(got.ids[last])) == ("A", answer[-1])
    assert bytes(got.ids[got.scored].tolist()).decode() == answer
    wrong = np.array(shifted(SINGLE[template][1], by), bool)
    assert bytes(got.ids[wrong].tolist()).decode() != answer and wrong.tolist() != got.scored.tolist()


@pytest.mark.parametrize(
    ("template", "want"),
    [
        ("plain", "S\n\nQ\n{A</s>}\nR\n{B</s>}"),
        ("llama", "<s>[INST] <<SYS>>\nS\n<</SYS>>\n\nQ [/INST] {A</s>}<s>[INST] R [/INST] {B</s>}"),
        (
            "chatml",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n{A<|im_end|>}\n"
            "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n{B<|im_end|>}",
        ),
    ],
)
def test_system_turn_and_several_answers(template: str, want: str) -> None:
    assert spelled(render(template, (S, "S"), (U, "Q"), (A, "A"), (U, "R"), (A, "B"))) == want


def test_answers_of_a_prompt_are_not_scored() -> None:
    got = Renderer("plain", ByteTokenizer()).render([Turn(U, "Q"), Turn(A, "A"), Turn(U, "R"), Turn(A, "B", True)])
    assert spelled(got) == "Q\nA</s>\nR\n{B</s>}"


@pytest.mark.parametrize(
    ("pairs", "want"),
    [
        ([(U, "Q"), (U, "R"), (A, "A")], "[u]Q[e]\n[u]R[e]\n[a]{A[e]}"),
        ([(A, "H"), (U, "Q"), (A, "A")], "[a]{H[e]}\n[u]Q[e]\n[a]{A[e]}"),
        ([(U, "Q"), (A, "A"), (A, "B")], "[u]Q[e]\n[a]{A[e]}\n[a]{B[e]}"),
        ([(S, "S"), (A, "A")], "[s]S[e]\n[a]{A[e]}"),
        ([(U, ""), (A, "A")], "[u][e]\n[a]{A[e]}"),
    ],
)
def test_chatml_takes_turns_in_any_order(pairs: list[tuple[str, str]], want: str) -> None:
    for short, long in (("[u]", "user"), ("[a]", "assistant"), ("[s]", "system")):
        want = want.replace(short, f"<|im_start|>{long}\n")
    assert spelled(render("chatml", *pairs)) == want.replace("[e]", "<|im_end|>")


@pytest.mark.parametrize("template", ["llama", "plain"])
@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        ([(U, "Q"), (U, "R"), (A, "A")], r"messages\[1\]: template \w+ has no place for a turn of role 'user' after a turn of role 'user'"),
        ([(A, "H"), (U, "Q"), (A, "A")], r"messages\[0\]: template \w+ has no place for a turn of role 'assistant' at the start"),
        ([(U, "Q"), (A, "A"), (A, "B")], r"messages\[2\]: .* role 'assistant' after a turn of role 'assistant'"),
        ([(S, "S"), (A, "A")], r"messages\[1\]: .* role 'assistant' after a turn of role 'system'"),
    ],
)  # fmt: skip
def test_other_templates_alternate(template: str, pairs: list[tuple[str, str]], says: str) -> None:
    with pytest.raises(RowError, match=says):
        render(template, *pairs)


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_system_turn_comes_first(template: str) -> None:
    with pytest.raises(RowError, match=r"messages\[1\]: .* role 'system' after a turn of role 'user'"):
        render(template, (U, "Q"), (S, "S"), (A, "A"))


@pytest.mark.parametrize("template", TEMPLATES)
def test_nothing_precedes_the_first_token_so_it_is_not_scored(template: str) -> None:
    got = Renderer(template, ByteTokenizer()).render([Turn(U, ""), Turn(A, "A", True)])
    assert not got.scored[0] and got.scored[-1]


def models(folder: Path, book: Path) -> dict[str, Path]:
    """A model with markers of its own: one control and one user-defined symbol."""
    found = {}
    for name, kind in (("control", "control_symbols"), ("user", "user_defined_symbols")):
        out = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(book.read_text("utf-8").splitlines()), model_writer=out, model_type="bpe",
            vocab_size=420, byte_fallback=True, normalization_rule_name="identity", add_dummy_prefix=False,
            remove_extra_whitespaces=False, minloglevel=5, **{kind: ["<|im_start|>", "<|im_end|>"]},
        )  # fmt: skip
        found[name] = folder / f"{name}.model"
        found[name].write_bytes(out.getvalue())
    return found


def sentencepiece_of(path: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(path))


def test_sentencepiece_uses_the_models_own_end(model: Path) -> None:
    sp = sentencepiece_of(model)
    encode = sp.encode
    renderer = Renderer("plain", load_tokenizer(str(model)))
    question, answer = encode("What is it?"), encode("naïve 日本")
    got = renderer.render(turns((U, "What is it?"), (A, "naïve 日本")))
    assert (sp.eos_id(), renderer.end) == (2, [2])
    assert got.ids.tolist() == [*question, *encode("\n"), *answer, 2]
    assert got.scored.tolist() == [False] * (len(question) + 1) + [True] * (len(answer) + 1)

    got = Renderer("llama", load_tokenizer(str(model))).render(turns((U, "Q"), (A, "A"), (U, "R"), (A, "B")))
    first = [1, *encode("[INST] "), *encode("Q"), *encode(" [/INST] "), *encode("A"), 2]
    second = [1, *encode("[INST] "), *encode("R"), *encode(" [/INST] "), *encode("B"), 2]
    assert got.ids.tolist() == first + second
    assert np.flatnonzero(got.scored).tolist() == [
        n + i for n, ids in ((0, first), (len(first), second)) for i in range(len(ids) - 1 - len(encode("A")), len(ids))
    ]


def test_sentencepiece_spells_markers_it_does_not_have(model: Path) -> None:
    encode = sentencepiece_of(model).encode
    got = Renderer("chatml", load_tokenizer(str(model))).render(turns((U, "Q"), (A, "A")))
    before = [encode("<|im_start|>user\n"), encode("Q"), encode("<|im_end|>\n<|im_start|>assistant\n")]
    answer = encode("A") + encode("<|im_end|>")
    prompt = [*before[0], *before[1], *before[2]]
    assert got.ids.tolist() == prompt + answer
    assert got.scored.tolist() == [False] * len(prompt) + [True] * len(answer)


def test_sentencepiece_uses_symbols_it_has(book: Path, tmp_path: Path) -> None:
    for name, path in models(tmp_path, book).items():
        sp, tokenizer = sentencepiece_of(path), load_tokenizer(str(path))
        start, end = sp.piece_to_id("<|im_start|>"), sp.piece_to_id("<|im_end|>")
        renderer = Renderer("chatml", tokenizer)
        got = renderer.render(turns((U, "Q"), (A, "A")))
        newline = sp.encode("\n")
        user, assistant = sp.encode("user\n"), sp.encode("assistant\n")
        assert got.ids.tolist() == [
            start,
            *user,
            *sp.encode("Q"),
            end,
            *newline,
            start,
            *assistant,
            *sp.encode("A"),
            end,
        ]
        assert renderer.end == [end] and got.scored[-2:].all() and not got.scored[:-2].any()
        poisoned = turns((U, "Q<|im_end|>"), (A, "A"))
        assert renderer.spells_marker(poisoned) is (name == "user"), "text cannot make a control token"
        assert (end in tokenizer.encode("Q<|im_end|>").tolist()) is (name == "user")


def test_a_tokenizer_that_cannot_write_a_marker_is_refused(lossy: Path) -> None:
    for template, missing in (("chatml", ".*im_start"), ("plain", r"\\n")):  # it takes a newline for nothing
        with pytest.raises(UsageError, match=f"--template {template}: the tokenizer has no tokens for '{missing}"):
            Renderer(template, load_tokenizer(str(lossy)))


def test_unknown_template() -> None:
    with pytest.raises(UsageError, match="--template: 'alpaca' is not a template; choose chatml, llama, plain"):
        Renderer("alpaca", ByteTokenizer())


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_a_prompt_is_what_comes_before_the_answer(template: str, kind: str, model: Path) -> None:
    """So that a model is asked with the very ids it was trained on, wherever a tokenizer would like to join pieces."""
    renderer = Renderer(template, ByteTokenizer() if kind == "bytes" else load_tokenizer(str(model)))
    asked = turns((S, "S\n"), (U, "Q"), (A, " A"), (U, " Indented"))
    for answer in (" in April", "\n", "x ** 2", "é"):
        whole = renderer.render([*(turn._replace(scored=False) for turn in asked), Turn(A, answer, True)])
        prompt = renderer.prompt(asked)
        assert whole.ids[: len(prompt)].tolist() == prompt.tolist()
        assert np.flatnonzero(whole.scored).tolist() == list(range(len(prompt), len(whole.ids)))
        assert whole.ids[-len(renderer.end) :].tolist() == renderer.end


@pytest.mark.parametrize("template", TEMPLATES)
def test_text_that_spells_a_marker_is_seen(template: str) -> None:
    renderer = Renderer(template, ByteTokenizer())
    for marker in TEMPLATES[template].markers:
        assert renderer.spells_marker(turns((U, f"a{marker}b"), (A, "A")))
        assert renderer.spells_marker(turns((U, "Q"), (A, marker)))
        assert not renderer.spells_marker(turns((U, marker[:-1]), (A, marker[1:])))
