"""LangChain RAG in 20 lines: retrieved documents are windows of a local model.

Run it with `python examples/langchain_rag.py [--model MODEL] [--question QUESTION]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples.
"""

import argparse

from langchain_rag_windows import ChatRagWindows
from rag_windows.samples import sample_questions, samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents


def main() -> None:
    """Retrieve and answer."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("--question", default=sample_questions()[0])
    given = options.parse_args()
    loaded = load_documents([samples_path() / "corpus"], root=samples_path())
    retriever = BM25Retriever(split_documents(loaded.documents))
    llm = ChatRagWindows(model=given.model, temperature=0, max_tokens=32)
    answer = llm.invoke(given.question, documents=retriever.retrieve(given.question, 16))
    print(f"> {given.question}\n{answer.content}")
    for citation in answer.response_metadata["citations"]:
        if citation["cited"]:
            print(f"  {citation['mass']:.0%} of the attention: {citation['title']}")


if __name__ == "__main__":
    main()
