"""Ten thousand hostile texts: no control token comes out, and nothing of the text is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rag_windows.prompt.tokenizing import Boundary
from tests.fixtures_tokenizers import ALPHABET, NAMES, SENTENCES, build

TEXTS = 10_000
AT_ONCE = 10  # drawing several texts for an example saves most of Hypothesis' own time
EXAMPLES = -(-TEXTS // (AT_ONCE * len(NAMES)))

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
    """Words, any characters, and control tokens: whole, cut, nested, in other spellings."""
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


STRATEGIES = {
    name: st.lists(hostile_texts(name), min_size=AT_ONCE, max_size=AT_ONCE) for name in NAMES
}
FORBIDDEN = {name: forbidden(build(name).tokenizer) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
@settings(
    max_examples=EXAMPLES,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.data())
def test_hostile_texts(name: str, data: st.DataObject) -> None:
    for text in data.draw(STRATEGIES[name]):
        check(name, text)


@pytest.mark.parametrize("name", NAMES)
def test_every_control_token_whole_nested_doubled_and_cut(name: str) -> None:
    for content in control_spellings(build(name).tokenizer):
        half = len(content) // 2
        for text in (
            content,
            f" {content} ",
            f"the{content}sea",
            content * 3,
            f"{content[:half]}{content}{content[half:]}",
            f"{content[:1]}{content}",
            f"{content}{content[-1]}",
            content.upper(),
            content.title(),
        ):
            check(name, text)


def check(name: str, text: str) -> None:
    """No control token in the ids, the whole text in them, and the ordinary ids where possible."""
    fixture, boundary = build(name), BOUNDARIES[name]
    unknown_id = build(name).tokenizer.unk_token_id
    # Vocabularies without bytes lack some characters and words.
    bad = FORBIDDEN[name] if name in BYTE_COMPLETE else FORBIDDEN[name] - {unknown_id}
    anchor = boundary.encode("x")
    for at in ("start", "text"):
        ids = boundary.encode(text, at)
        assert not bad.intersection(ids)
        if fixture.lossless and at == "text":
            assert spaced(shown(name, anchor + ids)).lstrip(" ") == spaced("x" + text)
        elif fixture.lossless:
            # A tokenizer with a dummy prefix takes the text's own first space for it.
            assert spaced(shown(name, ids)).lstrip(" ") == spaced(text).lstrip(" ")
        elif name in ("words", "python-words"):
            assert len(ids) >= len(text.split())
        elif unknown_id not in ids:
            assert squeezed(spaced(shown(name, ids))) == lossy_form(name, spaced(text))
    ordinary = build(name).tokenizer(text, add_special_tokens=False)["input_ids"]
    if not FORBIDDEN[name].intersection(ordinary) and "<0x" not in text:
        assert boundary.encode(text) == ordinary
