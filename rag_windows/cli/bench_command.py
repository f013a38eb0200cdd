"""The command `rag-windows bench` and its options."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rag_windows.cli import options

Shape = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="NAME",
        help="llama-0.25b, qwen-0.5b, llama-3.1-8b (random weights); tiny tries the command. "
        "Default: llama-0.25b.",
        show_default=False,
    ),
]
TimedModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        help="Time this model instead: a local folder or a name on the Hub.",
        show_default=False,
    ),
]
Contexts = Annotated[
    list[int] | None,
    typer.Option("--context", metavar="N", min=2, help="Tokens of all passages; repeatable."),
]
Windows = Annotated[
    list[int] | None,
    typer.Option("--window", metavar="N", min=2, help="Tokens of a passage; repeatable."),
]
Ragged = Annotated[
    bool, typer.Option("--ragged", help="Passages of different lengths, too, of this mean.")
]
NewTokens = Annotated[
    list[int] | None,
    typer.Option("--new-tokens", metavar="N", min=2, help="Answers so long; repeatable."),
]
Questions = Annotated[
    list[int] | None,
    typer.Option(
        "--questions", metavar="N", min=2, help="So many at once, sharing passages; repeatable."
    ),
]
QuestionContext = Annotated[
    int | None,
    typer.Option(
        "--question-context",
        metavar="N",
        min=2,
        help="Tokens of each such question's passages. Default: the first --context.",
        show_default=False,
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="NAME",
        help="A method to decode with beside --method, over the same windows; repeatable.",
    ),
]
DearAbove = Annotated[
    int | None,
    typer.Option(
        "--dear-above",
        metavar="N",
        min=2,
        help="Over longer contexts, plain transformers does only what the next two say.",
        show_default=False,
    ),
]
DearRounds = Annotated[
    int, typer.Option("--dear-rounds", metavar="N", min=1, help="Its rounds there.")
]
DearTokens = Annotated[
    int, typer.Option("--dear-tokens", metavar="N", min=2, help="Its new tokens there.")
]
Memory = Annotated[
    bool,
    typer.Option(
        "--memory/--no-memory", help="Measure peak memory, on the CPU in further processes."
    ),
]
Profile = Annotated[
    bool, typer.Option("--profile", help="Take the time of a further token apart; CPU only.")
]
Rounds = Annotated[
    int, typer.Option("--rounds", min=1, metavar="N", help="In each, every way answers once.")
]
Ways = Annotated[
    list[str] | None,
    typer.Option("--way", metavar="NAME", help="Only this way; repeatable. Default: all five."),
]
Threads = Annotated[
    int | None, typer.Option("--threads", min=1, metavar="N", help="On the CPU. Default: all.")
]
Device = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu or cuda.")]
Dtype = Annotated[
    Literal["bfloat16", "float16", "float32"], typer.Option("--dtype", help="Of the weights.")
]
Out = Annotated[
    str | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Writes performance.json, .md and .png there; the same call goes on after a kill.",
        show_default=False,
    ),
]
Compare = Annotated[
    str | None,
    typer.Option("--compare", metavar="FILE", help="An older performance.json: what moved."),
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
    dear_above: DearAbove = None,
    dear_rounds: DearRounds = 1,
    dear_tokens: DearTokens = 16,
    memory: Memory = True,
    profile: Profile = False,
    rounds: Rounds = 5,
    way: Ways = None,
    threads: Threads = None,
    device: Device = "cpu",
    dtype: Dtype = "bfloat16",
    method: Annotated[str, typer.Option("--method", metavar="NAME")] = "ape",
    out: Out = None,
    compare: Compare = None,
    verbose: options.Verbose = False,
) -> None:
    """Time windows beside plain transformers, the same tokens for both, on any weights."""
    from rag_windows.benchmark.result import WAYS
    from rag_windows.benchmark.workload import Plan
    from rag_windows.cli.bench import bench as run
    from rag_windows.errors import InputError

    if shape is not None and model is not None:
        raise InputError("--shape and --model exclude each other; leave one of them out.")
    plan = Plan(
        shape=shape or Plan().shape,
        model=model,
        dtype=dtype,
        device=device,
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
    run(plan, threads=threads, out=out, compare=compare, verbose=verbose)
