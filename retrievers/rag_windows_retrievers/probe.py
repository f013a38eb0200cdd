"""Whether a model makes the vectors that an index holds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rag_windows.errors import RetrievalError
from rag_windows_retrievers.encoder import Encoder

if TYPE_CHECKING:
    from rag_windows_retrievers.encoder import Vectors

PROBE = (
    "Which river runs through the old town?",
    "In 1871 the lighthouse keeper's daughter sold 3 boats, a bell & some letters (unsigned).",
    "def area(r): return 3.14159 * r ** 2",
)
"""Texts whose vectors are kept with an index, and made again when it is opened."""

_NEAR = 0.05
"""How far a probe's vector may move, of its length. Half precision and other devices move it by
about 0.01; another model, pooling, prompt or fine-tuning moves it by more."""


def check_model(
    folder: Path, encoder: Encoder, settings: Mapping[str, Any], probe: Vectors
) -> None:
    """Refuse an encoder whose vectors are not comparable with an index's.

    A model's name is not compared: the same model may lie in another folder now.

    Args:
        folder: of the index, for the message.
        encoder: to check.
        settings: ``model``, ``revision`` and ``dimension`` of the index.
        probe: (len(PROBE), dimension), as the index's model made it.

    Raises:
        RetrievalError: saying which model is needed.
    """
    import numpy as np

    made = (settings["revision"], settings["dimension"])
    now = (encoder.revision, encoder.dimension)
    same = made[1] == now[1] and (made[0] == now[0] or None in (made[0], now[0]))
    if same:
        moved = np.linalg.norm(encoder.embed(PROBE, query=False) - probe, axis=1)
        same = bool((moved <= _NEAR * np.linalg.norm(probe, axis=1)).all())
    if not same:
        raise RetrievalError(
            f"The vectors in {folder} were made by {settings['model']!r} (revision {made[0]}, "
            f"dimension {made[1]}), and {encoder.name!r} (revision {now[0]}, dimension {now[1]}) "
            "makes others. Load that model, or delete the folder and embed the passages anew."
        )
