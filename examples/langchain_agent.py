"""A LangChain agent whose documents come from a middleware, each one a window.

Run it with `python examples/langchain_agent.py [--model MODEL] [--question QUESTION]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples. With a model whose chat template knows tools, `tools=[...]` works as usual beside it.
"""

import argparse

from langchain.agents import create_agent
from langchain_core.messages import HumanMessage
from langchain_core.retrievers import BaseRetriever

from langchain_rag_windows import ChatRagWindows, RagWindowsMiddleware
from langchain_rag_windows.retrievers import RagWindowsRetriever
from rag_windows.samples import sample_questions, samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents


def sample_retriever() -> BaseRetriever:
    """Stands for your own retriever."""
    loaded = load_documents([samples_path() / "corpus"], root=samples_path())
    return RagWindowsRetriever(retriever=BM25Retriever(split_documents(loaded.documents)), k=16)


def main() -> None:
    """Ask the agent, and show what it retrieved and what it looked at."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("--question", default=sample_questions()[0])
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
