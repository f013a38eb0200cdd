"""An LCEL chain from question to answer, streamed, with its sources at the end.

Run it with `python examples/langchain_lcel.py [--model MODEL] [--question QUESTION]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples.
"""

import argparse
from typing import Any

from langchain_core.messages import AIMessageChunk, BaseMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from langchain_rag_windows import ChatRagWindows
from langchain_rag_windows.retrievers import RagWindowsRetriever
from rag_windows.samples import sample_questions, samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents


def sample_retriever() -> BaseRetriever:
    """Stands for your own retriever."""
    loaded = load_documents([samples_path() / "corpus"], root=samples_path())
    return RagWindowsRetriever(retriever=BM25Retriever(split_documents(loaded.documents)), k=16)


def chain(model: str) -> Runnable[str, BaseMessage]:
    """Retrieve, prompt, answer; the documents stay beside the prompt, each in its window."""
    llm = ChatRagWindows(model=model, temperature=0, max_tokens=32)
    prompt = ChatPromptTemplate.from_messages([("human", "{question}")])

    def answer(found: dict[str, Any]) -> Runnable[dict[str, Any], BaseMessage]:
        return prompt | llm.bind(documents=found["documents"])

    retrieved = {"question": RunnablePassthrough(), "documents": sample_retriever()}
    return retrieved | RunnableLambda(answer)


def main() -> None:
    """Print the pieces as they come, then what the whole message cites."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("--question", default=sample_questions()[0])
    given = options.parse_args()
    print(f"> {given.question}")
    whole: Any = AIMessageChunk(content="")
    for chunk in chain(given.model).stream(given.question):
        print(chunk.content, end="", flush=True)
        whole += chunk
    print()
    for citation in whole.response_metadata["citations"]:
        if citation["cited"]:
            print(f"  {citation['mass']:.0%} of the attention: {citation['title']}")


if __name__ == "__main__":
    main()
