"""Right answers: the embedded reader with a book."""

from __future__ import annotations

import numpy as np

from rag_windows import PCW, Codebook, Passage, WindowedLM
from training.tasks import draw_case

QUESTIONS = 6
PASSAGES = 16


def test_the_passage_that_holds_the_answer_is_found_and_read() -> None:
    """Of 16 passages a question; the names in all of them are held out from training."""
    lm = WindowedLM.from_pretrained("tiny-reader")
    rng = np.random.default_rng(17)
    found = right = 0
    for _ in range(QUESTIONS):
        case = draw_case(rng, "single", PASSAGES)
        book = lm.codebook(Codebook(retrieve=4, reader=PCW()))
        book.add([Passage(text, title=title) for title, text in case.passages])
        out = lm.generate(list(case.messages), book, max_new_tokens=12)
        question = case.messages[-1]["content"]
        titles = [book[str(one.id)].title for one in out.citations or ()]
        found += any(title is not None and title in question for title in titles)
        right += out.text.strip() == case.answer
    assert found >= QUESTIONS - 1
    assert right >= QUESTIONS - 2
