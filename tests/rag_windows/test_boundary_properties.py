"""Ten thousand hostile texts: no control token comes out, and nothing of the text is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from rag_windows.boundary import Boundary
from tests.fixtures_tokenizers import ALPHABET, NAMES, SENTENCES, build

TEXTS = 10_000
PER_FIXTURE = -(-TEXTS // len(NAMES))

BOUNDARIES = {name: Boundary(build(name).tokenizer) for name in NAMES}

BYTE_COMPLETE = {name for name in NAMES if name not in ("t5", "bert", "words", "python-words")}


def forbidden(tokenizer: Any) -> set[int]:
    """The rule once more, written from the tokenizer's own attributes."""
    ids = {i for i in tokenizer.all_special_ids if i is not None}
    for id_, token in tokenizer.added_tokens_decoder.items():
        if token.special or token.content.replace("▁", " ").strip():
            ids.add(id_)
    return ids


def control_spellings(tokenizer: Any) -> list[str]:
    names = {t.content for t in tokenizer.added_tokens_decoder.values()}
    names |= set(map(str, tokenizer.all_special_tokens))
    return sorted(name for name in names if name.replace("▁", " ").strip())


def hostile_texts(name: str) -> st.SearchStrategy[str]:
    """Ordinary words, any characters, and control tokens: whole, cut, nested, in other spellings."""
    spelled = st.sampled_from(control_spellings(build(name).tokenizer))
    cut = st.builds(lambda s, n: s[: n % (len(s) + 1)], spelled, st.integers(0, 30))
    rest = st.builds(lambda s, n: s[n % (len(s) + 1) :], spelled, st.integers(0, 30))
    nested = st.builds(
        lambda outer, inner, n: (
            outer[: n % (len(outer) + 1)] + inner + outer[n % (len(outer) + 1) :]
        ),
        spelled,
        spelled,
        st.integers(0, 30),
    )
    wide = spelled.map(lambda s: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in s))
    other = st.sampled_from(["<0x0A>", "<unk>", "[UNK]", "▁", " ", "\n\n", "\t", "    ", "\r\n"])
    words = st.sampled_from(SENTENCES)
    free = st.text(max_size=8) if name in BYTE_COMPLETE else st.text(ALPHABET, max_size=8)
    parts = [words, free, spelled, cut, rest, nested, other, spelled.map(str.upper)]
    if name in BYTE_COMPLETE:
        parts.append(wide)
    return st.lists(st.one_of(parts), min_size=1, max_size=5).map("".join)


def shown(name: str, ids: list[int]) -> str:
    """Decoded text, byte tokens joined to characters."""
    tokenizer = build(name).tokenizer
    model = getattr(tokenizer, "sp_model", None)
    if model is not None:
        return str(model.decode(ids))
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def spaced(text: str) -> str:
    """SentencePiece writes a space as ▁ and can't tell the two apart."""
    return text.replace("▁", " ")


def squeezed(text: str) -> str:
    return "".join(text.split())


def lossy_form(name: str, text: str) -> str:
    """What a lossy tokenizer keeps of a text, white space aside."""
    tokenizer = build(name).tokenizer
    if name == "gpt-sw3":
        return squeezed(tokenizer.preprocess_text(text))
    normalizer = tokenizer.backend_tokenizer.normalizer
    return squeezed(text if normalizer is None else normalizer.normalize_str(text))


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=PER_FIXTURE,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_hostile_text(name: str, data: st.DataObject) -> None:
    fixture = build(name)
    tokenizer = fixture.tokenizer
    text = data.draw(_texts(name))
    try:
        check(name, text)
    except UnicodeEncodeError:
        raise AssertionError(f"{name} can't encode {text!r}") from None
    assert tokenizer is fixture.tokenizer


def _texts(name: str) -> st.SearchStrategy[str]:
    if name not in _STRATEGIES:
        _STRATEGIES[name] = hostile_texts(name)
    return _STRATEGIES[name]


_STRATEGIES: dict[str, st.SearchStrategy[str]] = {}


def check(name: str, text: str) -> None:
    fixture, boundary = build(name), BOUNDARIES[name]
    tokenizer = fixture.tokenizer
    bad = forbidden(tokenizer)
    unknown = boundary.controls.unknown
    unknown_id = unknown[1] if unknown else None
    if name not in BYTE_COMPLETE:
        bad -= {unknown_id}  # characters and words that these vocabularies lack
    anchor = boundary.encode("x")
    for at in ("start", "text"):
        ids = boundary.encode(text, at)
        assert not bad.intersection(ids)
        if fixture.lossless:
            got = shown(name, anchor + ids if at == "text" else ids)
            if name == "gpt2-prefix-space" and not text[:1].isspace():
                got = got.removeprefix(" ")
            assert spaced(got) == spaced("x" + text if at == "text" else text)
        elif name in ("words", "python-words"):
            assert len(ids) >= len(text.split())
        elif unknown_id not in ids:
            assert squeezed(spaced(shown(name, ids))) == lossy_form(name, spaced(text))
    ordinary = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not forbidden(tokenizer).intersection(ordinary) and "<0x" not in text:
        assert boundary.encode(text) == ordinary
