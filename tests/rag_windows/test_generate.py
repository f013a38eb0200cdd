"""What an answer carries, how it ends, and which options and arguments are refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import Cache, StoppingCriteria

from rag_windows import GenerationError, InputError, ModelError, Passage, WindowedLM
from tests.rag_windows import small

PASSAGES: list[Any] = [
    "The tower is old.",
    {"text": "The river is wide.", "title": "River"},
]


def test_a_stop_string_ends_the_text_before_it() -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "seed": 3, "top_k": 40}
    whole = small.lm().generate("What?", PASSAGES, **options)
    middle = whole.text[len(whole.text) // 2 :][:1]
    out = small.lm().generate("What?", PASSAGES, stop=["not there", middle], **options)
    assert out.text == whole.text[: whole.text.find(middle)]
    assert out.finish_reason == "stop"
    assert len(out.token_ids) < len(whole.token_ids)
    theirs = small.lm().generate("What?", PASSAGES, stop_strings=[middle], **options)
    assert theirs.token_ids == out.token_ids, "transformers' own stop_strings"
    assert theirs.finish_reason == "stop"


class WholeText(StoppingCriteria):
    """Looks for strings in the text of all tokens of an answer, each time."""

    def __init__(self, *strings: str) -> None:
        self.strings = strings

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        begin = small.tokenizer().convert_tokens_to_ids("<|assistant|>")
        answers = [row[row.index(begin) + 1 :] for row in input_ids.tolist()]
        texts = [small.tokenizer().decode(row, skip_special_tokens=True) for row in answers]
        return torch.tensor([any(one in text for one in self.strings) for text in texts])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": True, "seed": 1},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "seed": 1},
        {"num_return_sequences": 3, "do_sample": True, "seed": 1},
        {"prompt_lookup_num_tokens": 4},
        {"assistant_model": small.model(seed=1)},
        {"method": "ensemble"},
        {"method": "sequential"},
    ],
    ids=lambda options: " ".join(options),
)
def test_stop_strings_end_every_way_of_decoding_where_the_whole_text_has_one(
    options: dict[str, Any],
) -> None:
    lm, options = small.lm(), {"max_new_tokens": 30, **options}
    plain = lm.generate("What?", PASSAGES, **options)
    text = plain.text
    ended = 0
    for stop in ([text[9:11]], [text[-3:], "not there"], ["\ufffd\ufffd"], [text[4]]):
        ours = lm.generate("What?", PASSAGES, stop=stop, **options)
        criteria = [WholeText(*stop)]
        theirs = lm.generate("What?", PASSAGES, stopping_criteria=criteria, **options)
        answers = [ours, *ours.alternatives]
        assert [one.token_ids for one in answers] == [
            one.token_ids for one in (theirs, *theirs.alternatives)
        ]
        assert all(
            one.text == small.before(other.text, *stop)
            for one, other in zip(answers, (theirs, *theirs.alternatives), strict=True)
        )
        ended += len(ours.token_ids) < len(plain.token_ids)
    assert ended


def test_several_answers() -> None:
    out = small.lm().generate(
        "What?", PASSAGES, do_sample=True, num_return_sequences=3, seed=1, max_new_tokens=5
    )
    answers = [out, *out.alternatives]
    assert len({answer.token_ids for answer in answers}) == 3
    for answer in answers:
        assert answer.citations is not None
        masses = [c.mass for c in answer.citations]
        assert sum(masses) + (answer.prefix_mass or 0) + (answer.query_mass or 0) == pytest.approx(
            1
        )


def test_assisted_decoding_gives_the_greedy_answer() -> None:
    greedy = small.lm().generate("What?", PASSAGES, max_new_tokens=12)
    assisted = small.lm().generate(
        "What?", PASSAGES, max_new_tokens=12, assistant_model=small.model(seed=1)
    )
    assert assisted.token_ids == greedy.token_ids
    assert assisted.citations is not None
    assert greedy.citations is not None
    for ours, theirs in zip(assisted.citations, greedy.citations, strict=True):
        assert ours.mass == pytest.approx(theirs.mass, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"input_ids": torch.tensor([[1]])}, "can't be passed to generate"),
        ({"cache_implementation": "static"}, "outside of any cache"),
        ({"output_attentions": True}, "read Generation.citations"),
        ({"guidance_scale": 2.0}, "unconditional pass"),
        ({"assistant_early_exit": 1}, "would not read the windows"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        small.lm().generate("What?", PASSAGES, **options)


@pytest.mark.parametrize(
    ("name", "value"), [("guidance_scale", 2.0), ("cache_implementation", "static")]
)
def test_the_models_own_configuration_is_checked_too(name: str, value: Any) -> None:
    model = copy.deepcopy(small.model())
    lm = WindowedLM.from_pretrained(model, tokenizer=small.tokenizer())
    setattr(model.generation_config, name, value)
    with pytest.raises(GenerationError, match=f"{name}={value!r} can't be used with windows"):
        lm.generate("What?", PASSAGES)


def test_bad_arguments_say_what_to_do() -> None:
    lm = small.lm()
    with pytest.raises(InputError, match=r"Wrap it in \[\]"):
        lm.generate("What?", "one passage")
    with pytest.raises(InputError, match="stop string must not be empty"):
        lm.generate("What?", PASSAGES, stop=["", "a"])
    with pytest.raises(InputError, match="query has no tokens"):
        lm.generate_ids(lm.encode_ids([1], [[2]]), [])
    with pytest.raises(InputError, match="Window 1 has no tokens"):
        lm.encode_ids([1], [[2], []])
    with pytest.raises(ModelError, match="Pass tokenizer="):
        WindowedLM.from_pretrained(small.model()).generate("What?")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("passages", [PASSAGES, []], ids=["passages", "none"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"do_sample": True, "seed": 1}], ids=str)
@pytest.mark.parametrize("method", ["ape", "sequential", "ensemble", "codebook"])
def test_an_answer_warns_of_nothing(
    method: str, options: dict[str, Any], passages: list[str]
) -> None:
    """Also not of names that the installed transformers calls deprecated."""
    lm = small.lm()
    assert lm.generate("What?", passages, method=method, max_new_tokens=3, **options).token_ids
    if not options:
        lm.generate("What?", passages, link_tokens=0.5, link_choose="query", max_new_tokens=2)
        lm.score("What?", passages, choices=["a", "b"])
        lm.generate_batch([{"query": "What?", "passages": passages, "max_new_tokens": 2}] * 2)


@pytest.mark.parametrize("beams", [1, 3])
def test_what_a_generation_carries(beams: int) -> None:
    """The windows' tokens count, and are never copied into the cache of an answer."""
    out = small.lm().generate("What?", PASSAGES * 3, max_new_tokens=6, num_beams=beams)
    parts = small.lm().engine.text.prompt.build("What?", [*map(Passage.of, PASSAGES)])
    around = len(parts.prefix_ids) + len(parts.query_ids)
    tokens = around + sum(len(window.ids) for window in parts.windows)
    (cache,) = (one for one in out.raw.values() if isinstance(one, Cache))
    assert cache.get_seq_length() == around + len(out.token_ids) - 1
    assert (out.usage.prompt_tokens, out.usage.cached_tokens) == (tokens, 0)
    assert out.usage.completion_tokens == len(out.token_ids) == 6
    assert out.finish_reason == "length"
    assert 0 < out.timings.encode_s <= out.timings.ttft_s <= out.timings.total_s


def test_added_words_may_be_allowed_in_text() -> None:
    tokenizer = copy.deepcopy(small.tokenizer())
    tokenizer.add_tokens(["Xyloph"])
    model = copy.deepcopy(small.model())
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    word = tokenizer.convert_tokens_to_ids("Xyloph")
    for text_tokens, there in (((), False), (["Xyloph"], True)):
        lm = WindowedLM.from_pretrained(model, tokenizer=tokenizer, text_tokens=text_tokens)
        parts = lm.engine.text.prompt.build("What?", [Passage("A Xyloph plays.")])
        assert (word in parts.windows[0].ids) is there
