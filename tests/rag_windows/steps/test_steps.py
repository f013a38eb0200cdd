"""Alignment, refinement, selective recompute and ensembles in whole requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rag_windows import (
    APE,
    PCW,
    DeepThinking,
    Generation,
    InputError,
    LimitError,
    Linked,
    Method,
    ParallelEnsemble,
    Passage,
    PassageCache,
    Sequential,
    StructuredPrompting,
    WindowedLM,
)
from rag_windows.interchange import PromptParts
from tests.parity import zoo
from tests.parity.engine import Recorder
from tests.rag_windows import small

PREFIX, QUERY = zoo.ids(4, 1), zoo.ids(3, 2)
WINDOWS = [zoo.ids(length, length) for length in (6, 7, 12)]
LENGTHS = (3, 19, 17, 18, 4, 20)
STRONG = DeepThinking(2, 0.3, 0.5)
ENTROPY = ParallelEnsemble(weights="entropy")
PASSAGES = [
    Passage("The tower is old.", id="tower", score=0.2),
    Passage("The river is wide and deep, and cold in spring.", title="River", score=0.9),
    Passage("Bread.", score=0.4),
]


def logits(lm: WindowedLM, method: Method) -> torch.Tensor:
    return lm.logits(lm.encode_ids(PREFIX, WINDOWS, method=method), QUERY)


def llama(**options: Any) -> WindowedLM:
    return WindowedLM(zoo.shared("llama"), **options)


def parts_of(lm: WindowedLM, query: str, method: Method | str | None = None) -> PromptParts:
    return small.request(lm, query, PASSAGES, method=method).parts


def ask(lm: WindowedLM | None = None, passages: Any = PASSAGES, **options: Any) -> Generation:
    arguments = {"max_new_tokens": 12, "do_sample": False, **options}
    return (lm or small.lm()).generate("What?", passages, **arguments)


def test_a_cached_window_is_found_at_its_position_only() -> None:
    lm = small.lm().with_cache(PassageCache("10MB"))
    method = StructuredPrompting()
    ids = [zoo.ids(length, number) for number, length in enumerate(LENGTHS)]

    def cached(windows: Any, by: Method = method) -> int:
        context = lm.encode_ids([1, 2], windows, method=by)
        assert context.query_start == 2 + max(map(len, windows))
        return context.cached_tokens

    assert cached(ids) == 0
    assert cached(ids[::-1]) == 2 + sum(LENGTHS)
    # Without the longest window the others end earlier, but for those of its length.
    assert cached(ids[:-1]) == 2
    # The longest window starts behind the prefix, as every window does for other methods.
    assert cached(ids, PCW()) == 2 + max(LENGTHS[:-1]) + 20
    warm = WindowedLM(small.model(), small.tokenizer(), method=method, cache=PassageCache("1MB"))
    with pytest.raises(InputError, match=r"'structured-prompting'.*such as 'ape'"):
        warm.warm([Passage("One.")])


def test_a_cache_keeps_refined_and_plain_windows_apart() -> None:
    lm, plain = llama(cache=PassageCache("20MB")), llama()
    total = len(PREFIX) + sum(map(len, WINDOWS))
    for method in (PCW(), STRONG, replace(STRONG, eta=0.2), replace(STRONG, positions="reuse")):
        first = lm.encode_ids(PREFIX, WINDOWS, method=method)
        assert first.cached_tokens == 0
        second = lm.encode_ids(PREFIX, WINDOWS[::-1], method=method)
        assert second.cached_tokens == total
        assert torch.equal(lm.logits(first, QUERY), logits(plain, method))
    read_otherwise = lm.encode_ids(PREFIX, WINDOWS, method=replace(STRONG, reader=APE(0.5, 0.7)))
    assert read_otherwise.cached_tokens == total
    one_window = replace(STRONG, reader=Sequential())
    for _ in range(2):
        context = lm.encode_ids(PREFIX, WINDOWS, method=one_window)
        # Only the prefix is kept: such a window is rarely asked for again.
        assert context.cached_tokens in (0, len(PREFIX))
        assert torch.equal(lm.logits(context, QUERY), logits(plain, one_window))
    assert not torch.allclose(logits(plain, one_window), logits(plain, Sequential()), atol=1e-2)


def test_a_second_question_encodes_nothing() -> None:
    lm = small.lm().with_cache(PassageCache("20MB"))
    options = {"method": DeepThinking(3), "max_new_tokens": 2}
    assert ask(lm, **options).usage.cached_tokens == 0
    with small.passes() as made:
        second = ask(lm, PASSAGES[::-1], **options)
    assert second.usage.cached_tokens >= sum(len(window.ids) for window in second.windows)
    # The question is read, and all but the last of the answer's tokens.
    assert sum(made) == second.usage.prompt_tokens - second.usage.cached_tokens + 1


def test_passes_behind_a_window_need_positions_for_it() -> None:
    """Checked before any work, by name; "reuse" needs none."""
    lm = WindowedLM(small.model(), small.tokenizer(), max_window_tokens=900)
    passages = ["One.", Passage("A sentence of some words. " * 24, id="p7")]
    gpt2 = WindowedLM(zoo.shared("gpt2"))  # it has 256 learned positions
    most = (256 - len(PREFIX)) // 2
    gpt2.encode_ids(PREFIX, [zoo.ids(most, 1)], method=DeepThinking(1))
    windows = [zoo.ids(5, 1), zoo.ids(most + 1, 1)]
    for steps, positions in ((1, "reuse"), (0, "continue")):
        gpt2.encode_ids(PREFIX, windows, method=DeepThinking(steps, positions=positions))  # type: ignore[arg-type]  # looped over
    with small.passes() as made:
        with pytest.raises(
            LimitError,
            match=r"Passage 1 \('p7'\) has 6\d\d tokens .* the model has 1024\. "
            r"Use positions='reuse', or windows of at most 5\d\d tokens\.",
        ):
            ask(lm, passages, method="deep-thinking")
        with pytest.raises(LimitError, match=r"All passages together .* at most 5\d\d tokens"):
            ask(lm, passages, method="deep-thinking+sequential")
    assert not made
    with pytest.raises(LimitError, match=f"Window 1 has {most + 1} tokens.*at most {most} tokens"):
        gpt2.encode_ids(PREFIX, windows, method=DeepThinking(1))
    ask(lm, passages, method=DeepThinking(positions="reuse"), max_new_tokens=1)
    gpt2.encode_ids(PREFIX, windows[:1], method=DeepThinking(1))


def test_linked_windows_have_to_fit_one_prompt() -> None:
    one, other = ask(link_tokens=0.4), ask(method=Linked(0.4, reader=APE()))
    assert (one.token_ids, one.citations) == (other.token_ids, other.citations)
    long = [f"{name} {'x' * 300}" for name in "abcd"]
    ask(passages=long, max_new_tokens=1)
    with pytest.raises(LimitError, match="'ape'"):
        ask(passages=long, max_new_tokens=1, link_tokens=4)


@pytest.mark.parametrize("choose", ["first", "deviation", "query", "last"])
def test_citations_stay_with_their_passages(choose: Any) -> None:
    made = ask(link_tokens=3, link_choose=choose)
    assert made.citations is not None
    found = [(citation.passage, citation.id) for citation in made.citations]
    assert found == [(0, "tower"), (1, None), (2, None)]
    total = sum(citation.mass for citation in made.citations)
    assert total + made.prefix_mass + made.query_mass == pytest.approx(1)  # type: ignore[operator]  # they are there with citations


def test_what_a_cache_can_reuse_of_linked_windows() -> None:
    lm = small.lm().with_cache(PassageCache())
    prefix = len(parts_of(lm, "What?").prefix_ids)

    def used(passages: Any, tokens: Any = 4, choose: Any = "first") -> tuple[int, int]:
        options = {"link_tokens": tokens, "link_choose": choose}
        made = ask(lm, passages, max_new_tokens=1, **options)
        cached = max(0, made.usage.cached_tokens - prefix)
        return cached, sum(len(window.ids) for window in made.windows)

    assert used(PASSAGES)[0] == 0
    cached, total = used(PASSAGES)
    assert cached == total - 4 * 2  # the first window's tokens are not run again
    assert used(PASSAGES, tokens=2)[0] == total - 2 * 2
    # However the question chooses them, and with it which windows they are of.
    assert used(PASSAGES, choose="query")[0] == total - 4 * 2
    first = used(PASSAGES[:1])[1]
    assert used([PASSAGES[0], PASSAGES[2], PASSAGES[1]])[0] == first
    assert used(PASSAGES, tokens="all")[0] == 0


QUESTIONS = ["What?", "How wide is the river?", "Is there bread, or a tower?"]


def linked_by_query(**options: Any) -> dict[str, Any]:
    return {"link_tokens": 3, "link_choose": "query", "max_new_tokens": 10, **options}


@pytest.mark.parametrize("cached", [False, True])
def test_tokens_chosen_by_the_query_in_batches_schedulers_and_streams(cached: bool) -> None:
    lm = small.lm().with_cache(PassageCache("20MB") if cached else None)
    asked = [
        {"query": query, "passages": PASSAGES, "do_sample": False, **linked_by_query()}
        for query in QUESTIONS
    ]
    alone = [lm.generate(**one) for one in asked]
    texts = [one.text for one in alone]
    assert len({*texts}) == len(texts)
    batched = lm.generate_batch(asked)
    assert [one.text for one in batched] == texts
    for one, other in zip(alone, batched, strict=True):
        masses = [citation.mass for citation in other.citations or ()]
        assert masses == pytest.approx([each.mass for each in one.citations or ()], abs=1e-5)
        assert len(other.windows) == other.usage.windows == 3
    with lm.scheduler() as scheduler:
        futures = [scheduler.submit(one) for one in asked]
        assert [future.result().text for future in futures] == texts
    streamed = ["".join(chunk.text for chunk in lm.stream(**one)) for one in asked]
    assert streamed == texts
    parts = parts_of(lm, QUESTIONS[0])
    again = {one.usage.windows - one.usage.cached_windows for one in batched}
    assert again == ({0} if cached else {3, 0})
    prompt = len(parts.prefix_ids) + sum(len(window.ids) for window in parts.windows)
    # Six tokens were encoded again, of windows that were there.
    assert batched[-1].usage.cached_tokens == prompt - 6


def test_scores_and_encoded_contexts_choose_for_each_question() -> None:
    lm, choices, method = small.lm(), ["a", "river", "old"], Linked(3, "query", reader=APE())
    for question in QUESTIONS:
        scores = lm.score(question, PASSAGES, choices, method=method)
        parts = parts_of(lm, question, method)
        windows = [window.ids for window in parts.windows]
        context = lm.encode_ids(parts.prefix_ids, windows, method=method)
        own = lm.engine.decoder.for_query(context, parts.query_ids)
        assert lm.engine.decoder.for_query(own, [5]) is own
        for score, choice in zip(scores, choices, strict=True):
            ids = small.tokenizer()(choice, add_special_tokens=False)["input_ids"]
            rows = lm.logits(own, [*parts.query_ids, *ids])[len(parts.query_ids) - 1 : -1]
            total = rows.log_softmax(-1).gather(1, torch.tensor(ids).unsqueeze(1)).sum().item()
            assert score.logprob == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"method": ParallelEnsemble(weights="retrieval"), "do_sample": True, "seed": 4},
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2, "seed": 1},
        {"prompt_lookup_num_tokens": 3},
    ],
)
def test_weights_of_an_ensemble_sum_to_one(options: dict[str, Any]) -> None:
    arguments = {"method": ENTROPY, "max_new_tokens": 12, "do_sample": False, **options}
    whole = ask(**arguments)
    for one in (whole, *whole.alternatives):
        assert one.citations is not None
        masses = [citation.mass for citation in one.citations]
        assert min(masses) > 0
        total = sum(masses) + one.prefix_mass + one.query_mass  # type: ignore[operator]  # they are there with citations
        assert total == pytest.approx(1, abs=1e-5)


def test_citations_of_an_ensemble_are_weights_times_the_rows_attention() -> None:
    """Windows of one length: each row is that window read alone."""
    lm, prefix, query = small.lm(), [0, 9, 30], [44, 21, 7]
    windows = [[50 + i, 60 + 2 * i, 70, 12 + i] for i in range(3)]

    def masses(context: Any, forced: list[int] | None = None) -> tuple[list[int], torch.Tensor]:
        options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None}
        if forced is not None:
            options["logits_processor"] = [Recorder(forced)]
        decoded = lm.engine.decoder.generate(context, query, options=options, record_weights=True)
        recorder = decoded.recorder
        assert recorder is not None
        first = recorder.first_position
        steps = [recorder.average([first + step], [0]) for step in range(3)]
        return decoded.sequences[0], torch.stack(steps)

    scores = (1.0, 0.2, 0.5)
    method = ParallelEnsemble(weights="retrieval")
    tokens, found = masses(lm.encode_ids(prefix, windows, method=method, scores=scores))
    expected = torch.zeros_like(found)
    for number, weight in enumerate(torch.softmax(torch.tensor(scores), dim=0)):
        _, rows = masses(lm.encode_ids(prefix, [windows[number]], method=PCW()), tokens)
        expected[:, number] += weight * rows[:, 0]
        expected[:, -2:] += weight * rows[:, -2:]
    assert torch.allclose(found, expected, atol=1e-5)


def test_the_retriever_decides() -> None:
    """With scores far apart the answer is that of the best passage, here the longest."""
    scored = [replace(passage, score=100.0 * (passage.score or 0)) for passage in PASSAGES]
    method = ParallelEnsemble(weights="retrieval")
    best = ask(passages=[PASSAGES[1]], method="pcw").token_ids
    assert ask(passages=scored, method=method).token_ids == best
    assert ask(method=method).token_ids != best
    told: list[int] = []
    with pytest.raises(InputError, match=r"Passage 1\b.*score"):
        ask(
            passages=[PASSAGES[0], "Unscored."],
            method=method,
            on_encoded=lambda done, _: told.append(done),
        )
    assert not told


def test_scores_of_an_ensemble_are_sums_of_combined_log_probabilities() -> None:
    lm, choices = small.lm(), ["a", "river", "old"]
    scores = lm.score("What?", PASSAGES, choices, method=ENTROPY)
    parts = parts_of(lm, "What?", ENTROPY)
    windows = [window.ids for window in parts.windows]
    context = lm.encode_ids(parts.prefix_ids, windows, method=ENTROPY)
    for score, choice in zip(scores, choices, strict=True):
        ids = small.tokenizer()(choice, add_special_tokens=False)["input_ids"]
        rows = lm.logits(context, [*parts.query_ids, *ids])[len(parts.query_ids) - 1 : -1]
        total = rows.gather(1, torch.tensor(ids).unsqueeze(1)).sum().item()
        assert score.logprob == pytest.approx(total, abs=1e-4)


def test_an_ensemble_reads_refined_windows_and_those_of_a_cache() -> None:
    cached, fresh = small.lm().with_cache(PassageCache("16MiB")), ask(method=ENTROPY)
    assert ask(cached, method=ENTROPY).token_ids == fresh.token_ids
    again = ask(cached, method=ENTROPY)
    assert again.token_ids == fresh.token_ids
    assert again.usage.cached_tokens > 0
    lm, prefix, windows, query = small.lm(), [0, 9], [[50, 60, 70], [51, 61]], [44, 21]
    strong = DeepThinking(steps=2, eta=0.9, reader=ParallelEnsemble())
    refined = lm.logits(lm.encode_ids(prefix, windows, method=strong), query)
    plain = lm.logits(lm.encode_ids(prefix, windows, method="ensemble"), query)
    assert (refined - plain).abs().max() > 1e-3
    one = lm.logits(lm.encode_ids(prefix, windows[:1], method=strong), query)
    alone = replace(strong, reader=PCW())
    expected = lm.logits(lm.encode_ids(prefix, windows[:1], method=alone), query)
    assert torch.allclose(one, expected.log_softmax(-1), atol=1e-4)


def dynamic_model() -> LlamaForCausalLM:
    """Its rotary tables change from 48 positions on."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=262, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=48, initializer_range=0.2,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.slow
def test_threads_do_not_meet_in_rotary_tables() -> None:
    model = dynamic_model()
    lm = WindowedLM.from_pretrained(model, method=PCW())
    lengths = [5, 30, 20, 36, 10, 25] * 4

    def answer(length: int) -> list[int]:
        context = lm.encode_ids([1, 2], [list(range(3, 3 + length)), [7, 8]])
        # The plain model's own long prompts rewrite the plain model's tables, not ours.
        model(torch.arange(3, 3 + 2 * length)[None])
        return lm.generate_ids(context, [4, 5], max_new_tokens=6)

    serial = [answer(length) for length in lengths]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, lengths)) == serial


def test_positions_past_rotary_tables_are_refused() -> None:
    lm = WindowedLM.from_pretrained(dynamic_model(), tokenizer=small.tokenizer())
    with pytest.raises(LimitError, match="49 positions, and from 48 on"):
        lm.encode_ids([1, 2], [list(range(3, 50))])
    context = lm.encode_ids([1, 2], [list(range(3, 43))])
    with pytest.raises(LimitError, match="smaller max_window_tokens"):
        lm.logits(context, [4] * 7)
    with pytest.raises(LimitError, match="50 positions"):
        lm.generate_ids(context, [4, 5], max_new_tokens=6)
    assert len(lm.generate_ids(context, [4, 5], max_new_tokens=4, min_new_tokens=4)) == 4
    with pytest.raises(LimitError, match="leave none for passages"):
        lm.generate("What?", ["One."], max_new_tokens=40)
