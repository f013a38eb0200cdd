"""The classification tasks that papers on many demonstrations use, with their wordings.

Two wordings are known, each as its authors released it:

- "pcw", Parallel Context Windows (https://arxiv.org/abs/2212.10947): demonstrations stand apart by
  a line "==". The paper has no MR; here it takes the form of SST-2.
- "structured-prompting" (https://arxiv.org/abs/2212.06713): all on one line. Its TREC label
  "Expression" is the class of abbreviations.

Both judge SST-2 and SST-5 by the validation split, and so does Structured Prompting MR; PCW draws
250 texts of it at random, Structured Prompting takes up to 4,000.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from rag_windows.errors import InputError
from rag_windows.icl import Template

Wording = Literal["pcw", "structured-prompting"]
WORDINGS: tuple[Wording, ...] = get_args(Wording)

_APART = "\n==\n"


@dataclass(frozen=True, slots=True)
class Worded:
    """How a task is written.

    Attributes:
        template: of demonstrations and texts.
        labels: a word for each class, in the order of `Named.classes`.
    """

    template: Template
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A task by its name.

    Attributes:
        hub: id of the data set on the Hugging Face Hub.
        config: of the data set, or None.
        text: column of the texts.
        label: column of the classes.
        classes: what that column holds, in the order of the words.
        demonstrations: split that they are drawn from.
        test: split that is asked.
        wordings: how it is written.
    """

    hub: str
    config: str | None
    text: str
    label: str
    classes: tuple[int | str, ...]
    demonstrations: str
    test: str
    wordings: Mapping[Wording, Worded]


def _pcw(text: str, label: str, *words: str) -> Worded:
    return Worded(Template(f"{text}: {{text}}\n{label}: {{label}}", separator=_APART), words)


def _structured(text: str, label: str, *words: str) -> Worded:
    return Worded(Template(f"{text}: {{text}} {label}: {{label}}"), words)


NAMED: Mapping[str, Named] = {
    "sst2": Named(
        "nyu-mll/glue",
        "sst2",
        "sentence",
        "label",
        (0, 1),
        "train",
        "validation",
        {
            "pcw": _pcw("Review", "Sentiment", "negative", "positive"),
            "structured-prompting": _structured("Sentence", "Sentiment", "negative", "positive"),
        },
    ),
    "sst5": Named(
        "SetFit/sst5",
        None,
        "text",
        "label",
        (0, 1, 2, 3, 4),
        "train",
        "validation",
        {
            "pcw": _pcw("Review", "Sentiment", "terrible", "bad", "okay", "good", "great"),
            "structured-prompting": _structured(
                "Sentence", "Sentiment", "terrible", "negative", "neutral", "positive", "great"
            ),
        },
    ),
    # The original "trec" needs a loading script, which `datasets` no longer runs.
    "trec": Named(
        "SetFit/TREC-QC",
        None,
        "text",
        "label_coarse_original",
        ("ABBR", "ENTY", "DESC", "HUM", "LOC", "NUM"),
        "train",
        "test",
        {
            "pcw": _pcw(
                "Question",
                "Type",
                *("abbreviation", "entity", "description", "human", "location", "numeric"),
            ),
            "structured-prompting": _structured(
                "Question",
                "Type",
                *("Expression", "Entity", "Description", "Person", "Location", "Number"),
            ),
        },
    ),
    "mr": Named(
        "cornell-movie-review-data/rotten_tomatoes",
        None,
        "text",
        "label",
        (0, 1),
        "train",
        "validation",
        {
            "pcw": _pcw("Review", "Sentiment", "negative", "positive"),
            "structured-prompting": _structured("Review", "Sentiment", "Negative", "Positive"),
        },
    ),
    "agnews": Named(
        "fancyzhx/ag_news",
        None,
        "text",
        "label",
        (0, 1, 2, 3),
        "train",
        "test",
        {
            "pcw": _pcw("input", "type", "world", "sports", "business", "technology"),
            "structured-prompting": _structured(
                "Article", "Category", "World", "Sports", "Business", "Technology"
            ),
        },
    ),
}


def worded(name: str, wording: str) -> Worded:
    """How a named task is written.

    Raises:
        InputError: there is no such wording.
    """
    found = next((one for one in WORDINGS if one == wording), None)
    if found is None:
        raise InputError(f"wording={wording!r} is none of {', '.join(WORDINGS)}.")
    return NAMED[name].wordings[found]
