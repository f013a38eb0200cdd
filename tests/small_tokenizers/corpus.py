"""Sentences to train on."""

from __future__ import annotations

_WORDS = (
    "the harbour of a quiet town opened in spring after its founder sold every ship and built one "
    "long white wall against wind rain sea salt then children asked who what where when why how "
    "answer question passage title think start end user model system assistant tool call file "
    "header text return turn begin of sentence reserved special token pad mask unused inst sys eot"
).split()

SENTENCES = tuple(
    " ".join(
        _WORDS[(i * 7 + j * (i % 11 + 1)) % len(_WORDS)] for j in range(3 + i % 9)
    ).capitalize()
    + ".?!"[i % 3]
    for i in range(400)
) + tuple(
    f"Line {i}: <b>{_WORDS[i % len(_WORDS)]}</b> (s) [x] |{i}| "
    f"café naïve 東京 привет\n\n  done_{i}/{i};"
    for i in range(60)
)

ALPHABET = sorted(
    set("".join(SENTENCES)) | set("<|>[]/_#▁ INSTabcdefghijklmnopqrstuvwxyz0123456789XAFU")
)
