"""Passages ranked by the words they share with a question."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rag_windows import Passage
from rag_windows.errors import InputError, RetrievalError
from rag_windows_retrievers import index_file
from rag_windows_retrievers.retriever import (
    DEFAULT_K,
    ScoredPassage,
    best,
    check_k,
    ranked_text,
)

_FILE = "bm25.safetensors"
_WORDS = 1
"""Raised when `tokenize` changes: the words of an older index would no longer be found."""

# A character of a script written without spaces is a word of its own.
_TOKEN = re.compile(r"[぀-ヿ㐀-䶿一-鿿]|[^\W぀-ヿ㐀-䶿一-鿿]+")

# Words that carry a question's grammar rather than its subject.
FUNCTION_WORDS = frozenset(
    "a an and are as at be been but by can could did do does for from had has have how i if in "
    "into is it its many me much my no not of on or please s she he her his him shall should so "
    "such tell that the their them then there these they this those to us was we were what when "
    "where which who whom whose why will with would you your".split()
)


def tokenize(text: str) -> list[str]:
    """Words of a text: compatibility-normalised, case-folded, no stemming."""
    return _TOKEN.findall(unicodedata.normalize("NFKC", text).casefold())


class BM25Retriever:
    """Okapi BM25 over the titles and texts of passages, computed by `bm25s`.

    The scoring is Lucene's variant (Kamphuis et al., "Which BM25 Do You Mean?", ECIR 2020), which
    is never negative. English function words in a question are ignored as long as another word of
    it is known; in the passages they count as words. A word that stands in a question twice counts
    twice. Passages that share no word with it are not found.

    Args:
        passages: the corpus; must not be empty.
        k1: how soon repeated words stop counting, at least 0.
        b: how much longer passages are discounted, 0 to 1.

    Raises:
        RetrievalError: there are no passages, or none holds a word.
        InputError: ``k1`` or ``b`` is out of range.
    """

    def __init__(self, passages: Sequence[Passage], *, k1: float = 1.5, b: float = 0.75) -> None:
        if not k1 >= 0 or not 0 <= b <= 1:
            raise InputError(f"BM25 needs k1 >= 0 and 0 <= b <= 1, not k1={k1}, b={b}.")
        self.passages = tuple(passages)
        self._vocabulary: dict[str, int] = {}
        rows = [
            [self._vocabulary.setdefault(word, len(self._vocabulary)) for word in words]
            for words in (tokenize(ranked_text(one)) for one in self.passages)
        ]
        if not self._vocabulary:
            raise RetrievalError("No passage holds a word; check the documents' contents.")
        import bm25s  # on first use: importing the engine needs none of it

        index = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy")
        index.index((rows, dict(self._vocabulary)), show_progress=False)
        # A sparse matrix of (passages, words), a column a word: what each adds to a score.
        self._columns = {name: index.scores[name] for name in ("data", "indices", "indptr")}

    def save(self, folder: str | Path) -> None:
        """Write passages and index into a folder, in place of an index that is there.

        Raises:
            InputError: a passage's metadata can't be written as JSON.
            RetrievalError: the folder can't be written.
        """
        words = np.frombuffer("\n".join(self._vocabulary).encode(), dtype=np.uint8)
        arrays = {**self._columns, "words": words}
        index_file.write(Path(folder) / _FILE, self.passages, {"words": _WORDS}, arrays)

    @classmethod
    def load(cls, folder: str | Path) -> BM25Retriever:
        """Read what `save` wrote.

        Raises:
            RetrievalError: there is no BM25 index, or it is damaged, or of another version.
        """
        path = Path(folder) / _FILE
        passages, settings, arrays = index_file.read(path, "words", "data", "indices", "indptr")
        if settings.get("words") != _WORDS:
            raise RetrievalError(f"The index in {folder} is of another version; build it anew.")
        loaded = cls.__new__(cls)
        loaded.passages = passages
        words = arrays.pop("words").tobytes().decode().split("\n")
        loaded._vocabulary = {word: number for number, word in enumerate(words)}
        loaded._columns = arrays
        return loaded

    def retrieve(self, query: str, k: int = DEFAULT_K) -> list[ScoredPassage]:
        """Rank the passages that share a word with the query; see `Retriever.retrieve`."""
        check_k(k)
        known = [word for word in tokenize(query) if word in self._vocabulary]
        telling = [word for word in known if word not in FUNCTION_WORDS]
        scores = np.zeros(len(self.passages), dtype=np.float32)
        starts = self._columns["indptr"]
        for number in (self._vocabulary[word] for word in telling or known):
            column = slice(starts[number], starts[number + 1])
            scores[self._columns["indices"][column]] += self._columns["data"][column]
        return best(self.passages, scores, k, above=0.0)
