"""What a passage is found by: words of every script, however a text and a question spell them."""

from __future__ import annotations

import random
import shutil
import sys
import unicodedata
from pathlib import Path
from typing import Literal

import pytest

from rag_windows import Passage
from rag_windows_retrievers import (
    BM25Retriever,
    ingest,
)
from rag_windows_retrievers.words import tokenize


def found(query: str, *texts: str) -> list[str]:
    """Which texts are found, best first."""
    passages = [Passage(text) for text in texts]
    return [one.text for one in BM25Retriever(passages).retrieve(query, len(texts))]


@pytest.mark.parametrize(
    ("query", "text", "other"),
    [
        # Hindi, Tamil, Bengali, Malayalam: the first letters of the other text are the same.
        ("हिन्दी", "वह हिन्दी बोलता है।", "हिम गिरा, नदी जमी, दीया जला।"),
        ("தமிழ்", "அவள் தமிழ் பேசுகிறாள்.", "தம பி ழ க"),
        ("বাংলা", "সে বাংলা বলে।", "ব ল আছে"),
        ("മലയാളം", "അവൾ മലയാളം പഠിച്ചു.", "മല യ ള"),
        # A letter with two marks that no single character stands for.
        ("q\u0323\u0307are", "The word q\u0307\u0323are is rare.", "are q a"),
    ],
)
def test_combining_marks_belong_to_their_word(query: str, text: str, other: str) -> None:
    assert found(query, other, text) == [text]


@pytest.mark.parametrize(
    ("bare", "marked"),
    [
        ("مدرسة", "مَدْرَسَة"),
        ("مدرسة", "مـــدرسة"),
        ("محمد", "مُحَمَّدٌ"),
        ("ירושלים", "יְרוּשָׁלַיִם"),
        ("московский", "моско́вский"),
        ("istanbul", "İstanbul"),
    ],
)
def test_marks_that_writers_leave_out_are_left_out(bare: str, marked: str) -> None:
    for query, text in ((bare, f"a {marked} b"), (marked, f"a {bare} b")):
        assert found(query, "c d", text) == [text]


@pytest.mark.parametrize(("one", "other"), [("schön", "schon"), ("مأكل", "ماكل"), ("काम", "कम")])
def test_letters_with_other_marks_are_other_letters(one: str, other: str) -> None:
    assert found(one, other, one) == [one]


FORMS: tuple[Literal["NFC", "NFD", "NFKC", "NFKD"], ...] = ("NFC", "NFD", "NFKC", "NFKD")


@pytest.mark.parametrize(
    "word",
    ["Zürich", "ＡＢＣ１２", "ﬁnden", "Straße", "สำคัญ", "ຄຳ", "ハード", "서울", "Việt"],
)
def test_a_word_is_found_in_each_of_its_normal_forms(word: str) -> None:
    for form in FORMS:
        text = f"x {unicodedata.normalize(form, word)} y"
        assert found(word.swapcase(), "z", text) == [text], form


@pytest.mark.parametrize(
    "invisible",
    ["\u00ad", "\u200b", "\u200c", "\u200d", "\u2060", "\ufeff", "\u200e", "\u202a", "\ufe0f"],
)
def test_invisible_characters_are_in_no_word(invisible: str) -> None:
    hidden = f"Go to Sul{invisible}ava today."
    assert found("Sulava", "Sul ava", hidden) == [hidden]
    assert found(f"Sula{invisible}va?", "Sula va", "Sulava") == ["Sulava"]


@pytest.mark.parametrize("end", ["-\n", "-\r\n", "- \n  ", "\u00ad\n", "\u2010\n", "\u2011\n"])
def test_a_word_divided_at_a_line_end_is_found(end: str) -> None:
    text = f"The infor{end}mation is old."
    assert found("information", "infor", text) == [text]


def test_a_compound_at_a_line_end_is_found_by_its_parts_too() -> None:
    text = "A well-\nknown bridge of 1990-\n1995."
    for query in ("known", "well-known", "wellknown", "1990", "1995"):
        assert found(query, "other", text) == [text]
    assert found("19901995", "other", text) == []


@pytest.mark.parametrize(
    ("query", "text", "other"),
    [
        ("เชียงใหม่", "เขาเกิดที่เชียงใหม่ในปี 2500", "เขาเรียนที่กรุงเทพในปี 2510"),
        ("น้ำตาล", "ร้านนี้ขายน้ำตาลทรายขาว", "ร้านนี้ขายข้าวและผัก"),
        ("iPhone", "เขาใช้iPhoneใหม่ทุกวัน", "เขาใช้วิทยุเก่าทุกวัน"),
        ("ไทย", "ประเทศไทยมีเมืองมาก", "ร้านนี้ขายข้าวและผัก"),
        ("ພາສາ", "ລາວເວົ້າພາສາລາວ", "ເຂົາກິນເຂົ້າ"),
        ("ខ្មែរ", "គាត់និយាយភាសាខ្មែរបានល្អ", "គាត់ញ៉ាំបាយ"),
        ("မြန်မာ", "သူသည်မြန်မာနိုင်ငံတွင်နေသည်", "ထမင်းစား"),
        ("大学", "他在北京大学读书", "他在火车站等人"),
        ("猫", "我家有一只黑猫", "他在火车站等人"),
        ("図書館", "彼は毎日図書館で本を読む", "彼は毎日駅で電車を待つ"),
        ("コンピュータ", "コンピュータグラフィックスを学ぶ", "彼は駅で待つ"),
        ("GPU", "新しいGPUを買った", "新しい本を読んだ"),
    ],
)
def test_words_inside_running_text_without_spaces_come_first(
    query: str, text: str, other: str
) -> None:
    assert found(query, other, text)[:1] == [text]


@pytest.mark.parametrize(
    ("query", "text"),
    [("ไทย", "ประเทศไทยมีเมืองมาก"), ("京都", "私は京都に住む"), ("ລາວ", "ປະເທດລາວ")],
)
def test_without_icu_characters_and_their_pairs_find_words(
    query: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "icu4py.breakers", None)
    assert found(query, "nothing", text) == [text]


def test_a_word_counts_more_than_its_characters() -> None:
    assert found("東京", "京都は東にある", "東京は西にある")[0] == "東京は西にある"
    assert found("大学", "学生が大勢いる", "大学生がいる")[0] == "大学生がいる"


def test_a_name_of_no_dictionary_is_found_wherever_it_stands() -> None:
    consonants, vowels = "กขคจชดตทนบปพมยรลวสห", ["า", "ี", "ู", "ะ", "ิ"]
    draw = random.Random(3)
    for _ in range(40):
        name = "".join(draw.choice(consonants) + draw.choice(vowels) for _ in range(3))
        text = f"ในปีที่แล้ว{name}เกิดที่เชียงใหม่"
        assert found(name, "ร้านขายข้าว", text)[:1] == [text], name


@pytest.mark.parametrize(
    ("query", "text", "other"),
    [
        ("How large is the US?", "The US has 50 states.", "They gave us bread, us all."),
        ("What is the US?", "In the U.S. it rains.", "Tell us what it is."),
        ("Who leads IT?", "Mara Venn heads IT here.", "It is cold and it rains; it is late."),
        ("When was the WHO founded?", "The WHO is an agency.", "He is one who came."),
        ("What is vitamin A for?", "All eyes need vitamin A daily.", "A vitamin C pill."),
        ("Is hepatitis-A rare?", "Hepatitis A is an illness.", "A hepatitis B case."),
        ("Who fought in World War I?", "World War I was long.", "World War II, I say."),
        ("Does Model S charge?", "The Model S is quick.", "The model's price is high."),
        ("US", "The US has 50 states.", "He sold bread."),
    ],
)
def test_function_words_in_capitals_are_names(query: str, text: str, other: str) -> None:
    assert found(query, other, text)[:1] == [text]


def test_function_words_are_left_out_of_questions_as_before() -> None:
    texts = ("It was who he was.", "The bridge of Halden.")
    assert found("Who was it that built the bridge?", *texts) == [texts[1]]
    assert found("Is it a bridge, I ask?", *texts) == [texts[1]]
    assert found("A BRIDGE", *texts) == [texts[1]]
    assert found("WHO WAS IN HALDEN", *texts) == [texts[1]]
    assert found("the of", *texts) == [texts[1]]


@pytest.mark.parametrize("seed", range(20))
def test_any_text_has_words_and_finds_itself(seed: int) -> None:
    draw = random.Random(seed)
    ranges = [(0, 0x250), (0x300, 0x370), (0x590, 0x700), (0xE00, 0xF00), (0x1780, 0x1800)]
    ranges += [(0x2000, 0x2070), (0x3040, 0x3100), (0x4E00, 0x4F00), (0xD800, 0xDFFF)]
    ranges += [(0x20000, 0x20100)]
    text = "".join(chr(draw.randrange(*draw.choice(ranges))) for _ in range(300))
    words = tokenize(text)
    assert sorted(words) == sorted(tokenize(text))
    assert all(words)
    assert found(text, "other", text)[:1] == [text]


def test_a_long_text_takes_time_by_its_length() -> None:
    for piece in ("A.", "A-\n", "น้ำ", "東", "\u0301", "I ", "a\u00ad\n", "\u064b", "AB"):
        tokenize(piece * 100_000)


def test_copies_of_a_file_take_one_place(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Halden\n\nThe bridge is old.\n")
    for number in range(8):
        shutil.copy(tmp_path / "a.md", tmp_path / f"copy{number}.md")
    (tmp_path / "b.md").write_text("# Sulava\n\nNo bridge here, and nothing else to see.\n")
    index = ingest([tmp_path], tmp_path / "index")
    hits = index.retriever.retrieve("bridge", 8)
    assert [hit.title for hit in hits] == ["Halden", "Sulava"]
