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


def _option(
    help_text: str, metavar: str = "N", least: int | None = None
) -> typer.models.OptionInfo:
    return typer.Option(help=help_text, metavar=metavar, min=least)


Numbers = list[int] | None
Names = list[str] | None


def bench(
    shape: Annotated[
        str | None,
        _option(
            "llama-0.25b, qwen-0.5b, llama-3.1-8b (random weights); tiny tries the command. "
            "Default: llama-0.25b.",
            "NAME",
        ),
    ] = None,
    model: Annotated[
        str | None,
        _option("Time this model instead: a local folder or a name on the Hub.", "MODEL"),
    ] = None,
    context: Annotated[Numbers, _option("Tokens of all passages; repeatable.", least=2)] = None,
    window: Annotated[Numbers, _option("Tokens of a passage; repeatable.", least=2)] = None,
    ragged: Annotated[
        bool, typer.Option("--ragged", help="Passages of different lengths, too, of this mean.")
    ] = False,
    new_tokens: Annotated[Numbers, _option("Answers so long; repeatable.", least=2)] = None,
    questions: Annotated[
        Numbers, _option("So many at once, sharing passages; repeatable.", least=2)
    ] = None,
    question_context: Annotated[
        int | None,
        _option("Tokens of each such question's passages. Default: the first --context.", least=2),
    ] = None,
    against: Annotated[
        Names,
        _option(
            "A method to decode with beside --method, over the same windows; repeatable.", "NAME"
        ),
    ] = None,
    dear_above: Annotated[
        int | None,
        _option(
            "Over longer contexts, plain transformers does only what the next two say.", least=2
        ),
    ] = None,
    dear_rounds: Annotated[int, _option("Its rounds there.", least=1)] = 1,
    dear_tokens: Annotated[int, _option("Its new tokens there.", least=2)] = 16,
    memory: Annotated[
        bool, typer.Option(help="Measure peak memory, on the CPU in further processes.")
    ] = True,
    profile: Annotated[
        bool, typer.Option("--profile", help="Take the time of a further token apart; CPU only.")
    ] = False,
    rounds: Annotated[int, _option("In each, every way answers once.", least=1)] = 5,
    way: Annotated[Names, _option("Only this way; repeatable. Default: all five.", "NAME")] = None,
    threads: Annotated[int | None, _option("On the CPU. Default: all.", least=1)] = None,
    device: Annotated[str, _option("cpu or cuda.", "DEVICE")] = "cpu",
    dtype: Annotated[
        Literal["bfloat16", "float16", "float32"], typer.Option(help="Of the weights.")
    ] = "bfloat16",
    method: Annotated[str, typer.Option(metavar="NAME")] = "ape",
    out: Annotated[
        str | None,
        _option(
            "Writes performance.json, .md and .png there; the same call goes on after a kill.",
            "DIR",
        ),
    ] = None,
    compare: Annotated[
        str | None, _option("An older performance.json: what moved.", "FILE")
    ] = None,
    verbose: options.Verbose = False,
) -> None:
    """Time windows beside plain transformers, the same tokens for both, on any weights."""
    if shape is not None and model is not None:
        raise InputError("--shape and --model exclude each other; leave one of them out.")
    quieten(verbose)
    import torch

    from rag_windows.benchmark.run import Plan, run
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
        with lock_folder(folder):
            result = run(plan, command, tell, folder / PARTIAL)
            print(markdown(result))
            result.save(folder / "performance.json")
            (folder / "performance.md").write_text(markdown(result), encoding="utf-8")
            draw(result, folder / "performance.png")
            tell(f"{folder}: performance.json, performance.md and performance.png")
            (folder / PARTIAL).unlink(missing_ok=True)
    if older is not None:
        print(f"### What moved\n\n{changes(older, result)}")
