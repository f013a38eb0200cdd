"""In-context learning: demonstrations in windows, a text behind them, and a label for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rag_windows.errors import InputError
from rag_windows.learning.classification import Classification, Normalize, check_normalize
from rag_windows.learning.demonstration import DemonstrationLike, demonstrations_of
from rag_windows.learning.labels import Labels
from rag_windows.learning.shown import Shown
from rag_windows.learning.sizing import Sizes
from rag_windows.learning.template import Template
from rag_windows.rescaling import Method

if TYPE_CHECKING:
    from rag_windows.text_level import TextLM


def classify(
    lm: TextLM,
    texts: Sequence[str],
    demonstrations: Sequence[DemonstrationLike],
    labels: Sequence[str] | None,
    *,
    template: Template | str | tuple[str, str] | None,
    method: str | Method | None,
    prefix: str | None,
    normalize: Normalize,
    calibrate_with: str | Sequence[str] | None,
    sizes: Sizes,
) -> list[Classification]:
    """See `WindowedLM.classify`."""
    check_normalize(normalize)
    form = Template.of(template)
    examples = demonstrations_of(demonstrations)
    neutral = [calibrate_with] if isinstance(calibrate_with, str) else list(calibrate_with or ())
    for kind, given in (("Text", texts), ("Content-free text", neutral)):
        for index, text in enumerate(given):
            if not isinstance(text, str) or not text.strip():
                raise InputError(
                    f"{kind} {index} must be a string that is not blank, not {text!r}."
                )
    choices = labels_for(lm, form, labels, examples)
    if not texts:
        return []
    shown = Shown.of(
        lm,
        [*texts, *neutral],
        examples,
        [choices],
        form=form,
        method=lm._method(method),
        prefix=prefix,
        sizes=sizes,
    )
    return shown.judge(texts, [choices] * len(texts), normalize, neutral).labels


def labels_for(
    lm: TextLM,
    form: Template,
    labels: Sequence[str] | None,
    demonstrations: Sequence[DemonstrationLike] = (),
) -> Labels:
    """Labels as a model's tokens behind a text in this form.

    Raises:
        InputError: see `Labels.of`.
    """
    prompt = lm._text().prompt
    gap = "" if prompt.is_chat else form.gap
    return Labels.of(
        labels,
        demonstrations_of(demonstrations),
        lambda label: prompt.encode_text(gap + label, continuation=True),
    )
