"""An LCEL chain from question to answer; each retrieved document is a window.

Run it with `python examples/langchain_lcel.py [--model MODEL] [--question QUESTION]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples.
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from langchain_rag_windows import ChatRagWindows
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

SAMPLES = Path(str(files("rag_windows"))) / "samples"
FIRST = (SAMPLES / "questions.jsonl").read_text(encoding="utf-8").splitlines()[0]


def sample_retriever() -> Runnable[str, list[Document]]:
    """Stands for your own retriever."""
    loaded = load_documents([SAMPLES / "corpus"], root=SAMPLES)
    ranked = BM25Retriever(split_documents(loaded.documents))

    def find(question: str) -> list[Document]:
        hits = ranked.retrieve(question, 16)
        return [Document(hit.text, id=hit.id, metadata={"title": hit.title}) for hit in hits]

    return RunnableLambda(find)


def chain(model: str) -> Runnable[str, str]:
    """Retrieve, prompt, answer; the documents stay beside the prompt."""
    llm = ChatRagWindows(model=model, temperature=0, max_tokens=32)
    prompt = ChatPromptTemplate.from_messages([("human", "{question}")])

    def answer(found: dict[str, Any]) -> Runnable[dict[str, Any], str]:
        return prompt | llm.bind(documents=found["documents"]) | StrOutputParser()

    retrieved = {"question": RunnablePassthrough(), "documents": sample_retriever()}
    return retrieved | RunnableLambda(answer)


def main() -> None:
    """Stream the answer of the chain."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("--question", default=json.loads(FIRST)["question"])
    given = options.parse_args()
    print(f"> {given.question}")
    for piece in chain(given.model).stream(given.question):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
