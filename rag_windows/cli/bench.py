"""The command `bench`: windows timed beside plain transformers."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from rag_windows.benchmark.result import WAYS, Result, changes, draw, markdown
from rag_windows.cli import options
from rag_windows.cli.errors import tell
from rag_windows.cli.models import choose_device, quieten
from rag_windows.errors import InputError

PARTIAL = "performance.partial.json"

Shape = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="llama-0.25b, qwen-0.5b, llama-3.1-8b (random weights); tiny tries the command. "
        "Default: llama-0.25b.",
        show_default=False,
    ),
]
TimedModel = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="Time this model instead: a local folder or a name on the Hub.",
        show_default=False,
    ),
]
Contexts = Annotated[
    list[int] | None,
    typer.Option(metavar="N", min=2, help="Tokens of all passages; repeatable."),
]
Windows = Annotated[
    list[int] | None, typer.Option(metavar="N", min=2, help="Tokens of a passage; repeatable.")
]
Ragged = Annotated[
    bool, typer.Option("--ragged", help="Passages of different lengths, too, of this mean.")
]
NewTokens = Annotated[
    list[int] | None, typer.Option(metavar="N", min=2, help="Answers so long; repeatable.")
]
Questions = Annotated[
    list[int] | None,
    typer.Option(metavar="N", min=2, help="So many at once, sharing passages; repeatable."),
]
QuestionContext = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=2,
        help="Tokens of each such question's passages. Default: the first --context.",
        show_default=False,
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A method to decode with beside --method, over the same windows; repeatable.",
    ),
]
SlowAbove = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=2,
        help="Over longer contexts, plain transformers does only what the next two say.",
        show_default=False,
    ),
]
SlowRounds = Annotated[int, typer.Option(metavar="N", min=1, help="Its rounds there.")]
SlowTokens = Annotated[int, typer.Option(metavar="N", min=2, help="Its new tokens there.")]
Memory = Annotated[bool, typer.Option(help="Measure peak memory, on the CPU in further processes.")]
Profile = Annotated[
    bool, typer.Option("--profile", help="Take the time of a further token apart; CPU only.")
]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="In each, every way answers once.")]
Ways = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="Only this way; repeatable. Default: all five."),
]
Threads = Annotated[int | None, typer.Option(min=1, metavar="N", help="On the CPU. Default: all.")]
Device = Annotated[str, typer.Option(metavar="DEVICE", help="cpu or cuda.")]
Dtype = Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Of the weights.")]
Out = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Writes performance.json, .md and .png there; the same call goes on after a kill.",
        show_default=False,
    ),
]
Compare = Annotated[
    str | None, typer.Option(metavar="FILE", help="An older performance.json: what moved.")
]


def bench(
    shape: Shape = None,
    model: TimedModel = None,
    context: Contexts = None,
    window: Windows = None,
    ragged: Ragged = False,
    new_tokens: NewTokens = None,
    questions: Questions = None,
    question_context: QuestionContext = None,
    against: Against = None,
    dear_above: SlowAbove = None,
    dear_rounds: SlowRounds = 1,
    dear_tokens: SlowTokens = 16,
    memory: Memory = True,
    profile: Profile = False,
    rounds: Rounds = 5,
    way: Ways = None,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
    method: Annotated[str, typer.Option(metavar="NAME")] = "ape",
    out: Out = None,
    compare: Compare = None,
    verbose: options.Verbose = False,
) -> None:
    """Time windows beside plain transformers, the same tokens for both, on any weights."""
    if shape is not None and model is not None:
        raise InputError("--shape and --model exclude each other; leave one of them out.")
    quieten(verbose)
    import torch

    from rag_windows.benchmark.run import run
    from rag_windows.benchmark.workload import Plan
    from rag_windows.evaluation.machine import lock_folder

    chosen = choose_device(device)
    plan = Plan(
        shape=shape or Plan().shape,
        model=model,
        dtype=dtype,
        device="cuda" if chosen == "auto" else chosen,
        contexts=tuple(context or (8192,)),
        windows=tuple(window or (256,)),
        ragged=ragged,
        tokens=tuple(new_tokens or (64,)),
        rounds=rounds,
        ways=tuple(way or WAYS),
        method=method,
        against=tuple(against or ()),
        questions=tuple(questions or ()),
        question_context=question_context,
        slow_above=dear_above,
        slow_rounds=dear_rounds,
        slow_tokens=dear_tokens,
        memory=memory,
        profile=profile,
    )
    plan.check()
    older = None if compare is None else Result.load(Path(compare))
    if threads is not None:
        torch.set_num_threads(threads)
    command = shlex.join(["rag-windows", *sys.argv[1:]])
    if out is None:
        result = run(plan, command, tell)
        print(markdown(result))
    else:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        with lock_folder(folder):
            result = run(plan, command, tell, folder / PARTIAL)
            print(markdown(result))
            result.save(folder / "performance.json")
            (folder / "performance.md").write_text(markdown(result), encoding="utf-8")
            draw(result, folder / "performance.png")
            for name in ("performance.json", "performance.md", "performance.png"):
                tell(f"{folder / name}")
            (folder / PARTIAL).unlink(missing_ok=True)
    if older is not None:
        print("\n".join(["### What moved", "", *changes(older, result)]))
