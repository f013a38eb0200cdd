"""Questions over a folder of documents, on the GPU: a cache that lasts, and sources.

Run it with `python examples/quickstart_gpu.py [--model MODEL] [--docs FOLDER] [QUESTION ...]`,
after `pip install "rag-windows[cli]"`. MODEL is a folder or a name on the Hub. FOLDER holds text,
Markdown, JSONL and, after `pip install "rag-windows[pdf]"`, PDF files. Without a GPU it runs as
well, with a model that fits, such as `--model tiny-reader`.
"""

import argparse
import os
from pathlib import Path

from rag_windows import WindowedLM
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
NOTES = Path(__file__).with_name("notes")
QUESTIONS = ("Where was Vara Zelmont born?", "What does Thornfield Garage make?")


def main() -> None:
    """Encode the documents once, then answer from the cache."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default=os.environ.get("RAG_WINDOWS_MODEL", LLAMA))
    options.add_argument("--docs", default=str(NOTES), metavar="FOLDER")
    options.add_argument("questions", nargs="*", default=QUESTIONS, metavar="QUESTION")
    given = options.parse_args()

    loaded = load_documents([given.docs])
    for file in loaded.skipped:
        print(f"Not read: {file.label}: {file.reason}")
    retriever = BM25Retriever(split_documents(loaded.documents))

    # The model goes to the GPU where there is one; the cache lasts, on disk, for the next run.
    lm = WindowedLM.from_pretrained(given.model, cache=True)
    warmed = lm.warm(retriever.passages)
    print(f"{warmed.encoded} windows encoded, {warmed.present} were in the cache.")

    for question in given.questions:
        passages = retriever.retrieve(question, 8)
        answer = lm.generate(question, passages, max_new_tokens=128)
        print(f"\n> {question}\n{answer.text}")
        for source in sorted(answer.citations or (), key=lambda one: -one.mass)[:3]:
            print(f"  {source.mass:.0%} of the attention: {passages[source.passage].id}")
        usage, seconds = answer.usage, answer.timings.ttft_s
        print(
            f"  first token after {seconds:.2f} s; {usage.cached_tokens} of "
            f"{usage.prompt_tokens} prompt tokens came from the cache"
        )
    if lm.cache is not None:
        lm.cache.close()


if __name__ == "__main__":
    main()
