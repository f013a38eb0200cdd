"""In-context learning: labels of a made-up language, from hundreds of demonstrations in windows.

Run it with `python examples/classify.py`; it needs no network.
"""

from __future__ import annotations

import argparse
import random
import time

from rag_windows import WindowedLM

FILLERS = "blobbin block blodra blofen blog blolt blonk bloppo".split()
KEYWORDS = {
    "Daxa": ["kobbin", "lunk", "gidra"],
    "Fepor": ["frelt", "konk", "lush"],
    "Morpist": ["gick", "luppo", "frenk"],
}


def sentence(drawn: random.Random, label: str) -> str:
    """Three words, one of which belongs to the label."""
    words = [drawn.choice(KEYWORDS[label]), *drawn.sample(FILLERS, 2)]
    return " ".join(drawn.sample(words, len(words)))


def main() -> None:
    """Label sentences that the model has never seen by words that it has never heard of."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-learner")
    options.add_argument("--windows", type=int, default=8)
    chosen = options.parse_args()

    drawn = random.Random(0)
    labels = list(KEYWORDS)
    demonstrations = [(sentence(drawn, label), label) for label in labels * 32]
    drawn.shuffle(demonstrations)
    truth = labels * 8
    texts = [sentence(drawn, label) for label in truth]

    lm = WindowedLM.from_pretrained(chosen.model)
    begun = time.perf_counter()
    found = lm.classify(texts, demonstrations, labels, windows=chosen.windows)
    seconds = time.perf_counter() - begun

    for one, label in list(zip(found, truth, strict=True))[:6]:
        bars = "  ".join(f"{name} {one.probabilities[name]:4.0%}" for name in labels)
        print(f"{one.text:24} {'right' if one.label == label else 'wrong'}  {bars}")
    right = sum(one.label == label for one, label in zip(found, truth, strict=True))
    print(
        f"\n{right} of {len(texts)} right: {len(demonstrations)} demonstrations in "
        f"{found[0].windows} windows, encoded once, {seconds:.2f} s."
    )


if __name__ == "__main__":
    main()
