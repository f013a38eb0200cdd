"""A LangChain agent whose documents come from a middleware, each one a window.

Run it with `python examples/langchain_agent.py [--model MODEL] [--question QUESTION]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples. With a model whose chat template knows tools, `tools=[...]` works as usual beside it.
"""

import argparse
import json
from importlib.resources import files
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage
from langchain_core.runnables import Runnable, RunnableLambda

from langchain_rag_windows import ChatRagWindows, RagWindowsMiddleware
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


def main() -> None:
    """Ask the agent, and show what it retrieved and what it looked at."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("--question", default=json.loads(FIRST)["question"])
    given = options.parse_args()
    llm = ChatRagWindows(model=given.model, temperature=0, max_tokens=32)
    agent = create_agent(llm, middleware=[RagWindowsMiddleware(sample_retriever())])
    result = agent.invoke({"messages": [HumanMessage(given.question)]})
    answer = result["messages"][-1]
    print(f"> {given.question}\n{answer.content}")
    print(f"  {len(result['retrieved_documents'])} documents were retrieved")
    for citation in answer.response_metadata["citations"]:
        if citation["cited"]:
            print(f"  {citation['mass']:.0%} of the attention: {citation['title']}")


if __name__ == "__main__":
    main()
