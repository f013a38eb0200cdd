"""A run over texts that want to be more than text."""

from __future__ import annotations

from dataclasses import replace

from rag_windows.evaluation.record import ReadPassage, digest_of
from rag_windows.evaluation.report import ReportedRun
from rag_windows.evaluation.task import Example, Reference
from tests.rag_windows.evaluation.report import invented

SCRIPT = "<script>window.hacked=1</script>"
IMAGE = '"><img src=x onerror="window.hacked=1">'
FRAME = "</details></section><style>body{display:none}</style><iframe src=https://example.org>"
LINK = "[here](javascript:window.hacked=1) <a href='javascript:window.hacked=1'>x</a>"
HIDDEN = "\u202eesrever\u202c \x1b[31mred \x00 \x07 \ufffe \ud800 \u2066"
KIND = "$\\frac{<b>$ " + SCRIPT
LARGE = 1 << 20
LONG_WORD = "W" * 3000


def run() -> ReportedRun:
    """Two methods at two depths, over two questions a conversation."""
    task = invented.Asked(
        tuple(
            replace(
                invented.example(place, kinds=(KIND, "__kind", "種類")),
                key=f"{IMAGE}{HIDDEN}{place}",
                messages=(
                    {"role": FRAME, "content": SCRIPT},
                    {"role": "user", "content": f"{IMAGE} {LINK} {HIDDEN} {LONG_WORD}"},
                ),
                references=(Reference(FRAME + HIDDEN, SCRIPT, (IMAGE, "Velmor:99")),),
            )
            for place in range(12)
        ),
        name=SCRIPT + HIDDEN,
    )
    compared = invented.arms(("sequential", "ape"), (2, 4))
    texts: dict[str, str] = {}
    records = {
        arm.name: {
            one.key: replace(
                made := invented.record(one, place, arm, texts, 4),
                answer=f"{SCRIPT} {LINK} | `x` {made.answer.split()[-1]}",
                passages=tuple(_hostile(read, texts, one) for read in made.passages),
                notes=(HIDDEN + SCRIPT,),
            )
            for place, one in enumerate(task.examples)
        }
        for arm in compared
    }
    return invented.reported(
        task,
        compared,
        records,
        texts,
        title=FRAME,
        command=f"rag-windows eval --data '{SCRIPT}'\n```\n{IMAGE}",
        settings={"model": {"name": IMAGE}, "prefix": SCRIPT + HIDDEN, "retriever": {FRAME: LINK}},
    )


def _hostile(read: ReadPassage, texts: dict[str, str], asked: Example) -> ReadPassage:
    body = f"{SCRIPT}{IMAGE}{FRAME}{LINK}{HIDDEN}{LONG_WORD}"
    if read.id == "Velmor:3":
        body = (SCRIPT + "0123456789") * (LARGE // 40)
    texts[digest_of(body)] = body
    # The last span reaches beyond the text.
    spans = ((0, 30), (40, len(body) + 10)) if read.spans else ()
    return replace(read, text=digest_of(body), title=SCRIPT + HIDDEN, id=IMAGE, spans=spans)
