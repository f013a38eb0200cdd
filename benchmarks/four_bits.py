"""Four-bit weights on a CPU: a GGUF file read by llama.cpp and by `WindowedLM`, side by side.

    python -m benchmarks.four_bits model.gguf --contexts 2048,8192 --threads 2

Each condition runs in a process of its own, one after the other, in every round. llama.cpp is the
server of the package xllamacpp (``pip install xllamacpp``; --llama-python names another
interpreter that has it), with its prompt cache, as its users run it. What is measured:

- load: seconds until the model can be asked, its files in the system's cache;
- cold: seconds to the first token over passages that were never seen;
- again: over the same passages in the same order, with another question;
- reordered: over the same passages in another order, with another question;
- step: milliseconds of a token behind the first, over all passages;
- memory: the largest resident size of the process.

A prompt cache finds the longest beginning that it has seen. So "reordered" begins with another
passage. ``WindowedLM`` keeps its windows in memory, which is what ``cache=True`` does. Its weights
are unpacked from the file to a dtype, or packed to 8 bits ("int8"), which computes in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

WORDS = 180
"""Of a passage: about 256 tokens of this project's pages."""
QUESTIONS = (
    "Which of these passages is about a cache, and what does it say?",
    "What is the largest number that is named here, and what is it of?",
    "Who is this written for, and what should they do first?",
)
NEW_TOKENS = 24


def passages(context: int) -> list[str]:
    """Texts of this project's pages, about 256 tokens each, for so many tokens together."""
    pages = Path(__file__).parent.parent / "docs"
    words = [word for page in sorted(pages.glob("*.md")) for word in page.read_text().split()]
    count = context // 256
    return [" ".join(words[at * WORDS : (at + 1) * WORDS]) for at in range(count)]


Ask = Callable[[Sequence[str], str, int], tuple[float, float]]
"""Passages, question and new tokens give seconds to the first token and of a further one."""


def llama(model: str, threads: int) -> Ask:
    """The server of llama.cpp in this process."""
    xllamacpp: Any = import_module("xllamacpp")
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.n_ctx, parameters.n_parallel = 16384, 1
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(parameters)

    def ask(texts: Sequence[str], question: str, new: int) -> tuple[float, float]:
        prompt = "\n\n".join([*texts, f"Question: {question}\nAnswer:"])
        begun = time.perf_counter()
        answer = server.handle_completions(
            {
                "prompt": prompt,
                "n_predict": new,
                "temperature": 0,
                "cache_prompt": True,
                "ignore_eos": True,
                "timings_per_token": True,
            }
        )
        seconds = time.perf_counter() - begun
        found = json.loads(answer) if isinstance(answer, str) else answer
        # The first of the predicted tokens comes with the prompt.
        step = found["timings"]["predicted_ms"] / 1000 / max(1, found["timings"]["predicted_n"] - 1)
        return seconds - (new - 1) * step, step

    return ask


def windowed(model: str, threads: int, method: str, form: str) -> Ask:
    """`WindowedLM` with a passage cache in memory, its weights unpacked to a dtype or packed."""
    import torch

    from rag_windows import PassageCache, WindowedLM

    torch.set_num_threads(threads)
    cache = PassageCache(memory="4GiB")
    lm = WindowedLM.from_pretrained(
        model,
        method=method,
        cache=cache,
        dtype="bfloat16" if form == "int8" else form,
        quantization="int8" if form == "int8" else None,
        device_map="cpu",
    )

    def ask(texts: Sequence[str], question: str, new: int) -> tuple[float, float]:
        timings = lm.generate(
            question, texts, max_new_tokens=new, min_new_tokens=new, prefix="Answer shortly."
        ).timings
        return timings.ttft_s, (timings.total_s - timings.ttft_s) / max(1, new - 1)

    return ask


def measure(ask: Ask, context: int) -> dict[str, float]:
    """Seconds of each kind of question."""
    texts = passages(context)
    cold, step = ask(texts, QUESTIONS[0], NEW_TOKENS)
    again, _ = ask(texts, QUESTIONS[1], 2)
    reordered, _ = ask([*texts[1:], texts[0]], QUESTIONS[2], 2)
    return {"cold": cold, "again": again, "reordered": reordered, "step": 1000 * step}


def run(options: argparse.Namespace) -> None:
    """One condition in this process; prints one line of JSON."""
    kind, _, method = options.condition.partition(" ")
    begun = time.perf_counter()
    if kind == "llama.cpp":
        ask = llama(options.model, options.threads)
    else:
        ask = windowed(options.model, options.threads, method, kind)
    found: dict[str, Any] = {"load": time.perf_counter() - begun}
    for context in options.contexts:
        found[str(context)] = measure(ask, context)
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"condition": options.condition, **found}))


def table(made: Sequence[dict[str, Any]], contexts: Sequence[int]) -> str:
    """Medians of the rounds, a row a condition and a context."""
    columns = ("cold", "again", "reordered", "step")
    head = "| condition | tokens | load, s | cold, s | again, s | reordered, s | step, ms | GiB |"
    lines = [head, "|---|---|---|---|---|---|---|---|"]
    for name in dict.fromkeys(one["condition"] for one in made):
        runs = [one for one in made if one["condition"] == name]
        load, memory = (median(one[key] for one in runs) for key in ("load", "memory"))
        for context in contexts:
            cells = [median(one[str(context)][key] for one in runs) for key in columns]
            shown = " | ".join(f"{cell:.3g}" for cell in cells)
            lines.append(f"| {name} | {context} | {load:.2f} | {shown} | {memory / 2**30:.2f} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Four bits: llama.cpp and WindowedLM.")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--weights", default="float32,bfloat16,int8")
    parser.add_argument("--contexts", default="2048,8192")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--methods", default="auto,pcw")
    parser.add_argument("--llama-python", default=sys.executable)
    parser.add_argument("--without-llama", action="store_true", help="only our conditions")
    parser.add_argument("--out", type=Path, help="file for one line of JSON a run")
    parser.add_argument("--condition", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    given = options.contexts
    options.contexts = [int(one) for one in given.split(",")]
    if options.condition:
        run(options)
        return
    methods = options.methods.split(",")
    forms = options.weights.split(",")
    conditions = [] if options.without_llama else ["llama.cpp"]
    conditions += [f"{form} {method}" for form in forms for method in methods]
    made: list[dict[str, Any]] = []
    for _ in range(options.rounds):
        for condition in conditions:
            python = options.llama_python if condition == "llama.cpp" else sys.executable
            command = [python, str(Path(__file__)), options.model, "--condition", condition]
            command += ["--contexts", given, "--threads", str(options.threads)]
            done = subprocess.run(  # noqa: S603 - this program, and an interpreter that the user names
                command, capture_output=True, text=True, check=False
            )
            if done.returncode:
                print(f"{condition} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
                continue
            made.append(json.loads(done.stdout.strip().splitlines()[-1]))
            print(made[-1], flush=True)
            if options.out is not None:
                options.out.write_text("".join(json.dumps(one) + "\n" for one in made))
    print(table(made, options.contexts))


if __name__ == "__main__":
    main()
