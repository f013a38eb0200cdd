"""An arm's demonstrations in windows, ready for texts."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from rag_windows.errors import LimitError
from rag_windows.evaluation.arm import Arm
from rag_windows.evaluation.record import ReadPassage
from rag_windows.icl.classifier import Shown
from rag_windows.icl.demonstrations import Labels
from rag_windows.icl.packing import Sizes
from rag_windows.passage import Passage

if TYPE_CHECKING:
    from rag_windows.evaluation.icl.task import IclTask
    from rag_windows.model import WindowedLM


@dataclass(frozen=True, slots=True)
class Ready:
    """Windows, and what a record keeps of them.

    Attributes:
        shown: judges texts.
        left_out: demonstrations that did not fit.
        passages: the windows, as a record keeps them.
    """

    shown: Shown
    left_out: int
    passages: tuple[ReadPassage, ...]

    @classmethod
    def of(
        cls,
        lm: WindowedLM,
        task: IclTask,
        arm: Arm,
        seed: int,
        prefix: str | None,
        longest: str,
        choices: Sequence[Labels],
    ) -> Self:
        """As many demonstrations as the arm asks for and the model's positions allow.

        They allow all of them, unless the arm's method reads one window after the other: then the
        first ones.

        Args:
            lm: the model.
            task: whose demonstrations are shown.
            arm: says how many, and how they are read.
            seed: of the draw.
            prefix: system prompt, or None.
            longest: of the texts that will be judged.
            choices: by which they will be.

        Raises:
            InputError: there are fewer demonstrations than asked for.
            LimitError: the text or a demonstration doesn't fit the model's positions.
        """
        demonstrations = task.shown(arm.top_k, seed)

        def shown(count: int) -> Shown:
            def filled(sizes: Sizes) -> Shown:
                return Shown.of(
                    lm.engine,
                    [longest, *task.options.calibrate_with],
                    demonstrations[:count],
                    choices,
                    form=task.template,
                    method=arm.method,
                    prefix=prefix,
                    sizes=sizes,
                )

            *first, last = task.options.sizes(count)
            for sizes in first:
                # It asks for a number of windows, which may be too few.
                with suppress(LimitError):
                    return filled(sizes)
            return filled(last)

        def too_many(count: int) -> bool:
            return not shown(count).fits(longest, choices)

        kept = len(demonstrations)
        if too_many(kept):
            # Where not even the first one fits, the engine says so when it is asked.
            kept = max(1, bisect_left(range(kept), True, lo=1, key=too_many) - 1)
        made = shown(kept)
        apart = made.method.windowed
        passages = tuple(
            ReadPassage.of(
                Passage(text, id=f"window {number}"), spans=((0, len(text)),) if apart else ()
            )
            for number, text in enumerate(made.windows, start=1)
        )
        return cls(made, len(demonstrations) - kept, passages)
