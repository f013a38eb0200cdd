from __future__ import annotations

from typing import Any

import pytest

from rag_windows import InputError
from rag_windows.icl import Demonstration, Template
from rag_windows.icl.demonstrations import demonstrations_of


def test_the_default_is_a_line_of_text_colon_label() -> None:
    form = Template.of(None)
    assert form.show(Demonstration("a b", "x")) == "a b: x"
    assert form.ask("a b") == "a b:"
    assert (form.separator, form.gap) == ("\n", " ")


@pytest.mark.parametrize(
    ("given", "query", "gap"),
    [
        ("Review: {text}\nSentiment: {label}", "Review: {text}\nSentiment:", " "),
        ("{text} ->\n{label}.", "{text} ->", "\n"),
        ("{text}={label}", "{text}=", ""),
        (("{label}: {text}", "{text}: "), "{text}: ", ""),
        (("{text}: {label}", "Classify {text}:"), "Classify {text}:", " "),
        (Template("{text}: {label}", "{text} :"), "{text} :", " "),
    ],
)
def test_the_query_is_the_demonstration_up_to_its_label(given: Any, query: str, gap: str) -> None:
    form = Template.of(given)
    assert (form.query, form.gap) == (query, gap)


def test_braces_of_texts_and_forms_are_data() -> None:
    form = Template("{0} {{text}} {text} {label}")
    shown = form.show(Demonstration("{label} {0} {", "{text}"))
    assert shown == "{0} {{label} {0} {} {label} {0} { {text}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("{label}", r"lacks \{text\}"),
        ("{text}", r"lacks \{label\}"),
        ("{label}: {text}", "must hold {text} and no {label}"),
        (("{text}: {label}", "Which?"), "must hold {text}"),
        (("{text}: {label}", "{text}: {label}"), "and no {label}"),
        ((1, "{text}"), "demonstration must be a string, not int"),
        (("a", "b", "c"), "a string or a pair"),
        (5, "must be a Template"),
    ],
)
def test_forms_that_cannot_work_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Template.of(given)


def test_an_empty_separator_is_refused() -> None:
    with pytest.raises(InputError, match="separator is empty"):
        Template(separator="")


def test_demonstrations_come_as_pairs_mappings_or_objects() -> None:
    same: list[Any] = [("a", "x"), ["a", "x"], {"label": "x", "text": "a"}, Demonstration("a", "x")]
    assert demonstrations_of(same) == [Demonstration("a", "x")] * 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([("a", "x"), ("b",)], "Demonstration 1: it must be a"),
        (["ab"], "Demonstration 0: it must be a"),
        ([{"text": "a", "tag": "x"}], r"keys 'text' and 'label', not \['tag', 'text'\]"),
        ([("a", 1)], "label must be a string that is not blank, not 1"),
        ([(" ", "x")], "text must be a string that is not blank"),
        (("a: x"), "must be a list"),
        ({"text": "a", "label": "x"}, "must be a list"),
    ],
)
def test_demonstrations_that_cannot_be_read_are_named(given: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        demonstrations_of(given)
