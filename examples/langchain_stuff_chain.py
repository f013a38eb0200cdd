"""Your existing stuff chain: change two lines, and each document is a window.

Run it with `python examples/langchain_stuff_chain.py [--model MODEL] [--question QUESTION]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples.
"""

import argparse

from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever

from langchain_rag_windows import ChatRagWindows, WindowDocumentPrompt
from langchain_rag_windows.retrievers import RagWindowsRetriever
from rag_windows.samples import sample_questions, samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

try:
    from langchain_classic.chains import create_retrieval_chain
    from langchain_classic.chains.combine_documents import create_stuff_documents_chain
except ImportError:
    raise SystemExit(
        "The stock chains are not installed; run: pip install langchain-classic"
    ) from None


def sample_retriever() -> BaseRetriever:
    """Stands for your own retriever."""
    loaded = load_documents([samples_path() / "corpus"], root=samples_path())
    return RagWindowsRetriever(retriever=BM25Retriever(split_documents(loaded.documents)), k=16)


def main() -> None:
    """The stock chain, but for the two lines that say what they were before."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("--question", default=sample_questions()[0])
    given = options.parse_args()
    prompt = ChatPromptTemplate.from_messages([("human", "{context}\n\n{input}")])

    # Was: llm = ChatHuggingFace(llm=HuggingFacePipeline.from_model_id(model, "text-generation"))
    llm = ChatRagWindows(model=given.model, temperature=0, max_tokens=32)
    # Was: answer = create_stuff_documents_chain(llm, prompt)
    answer = create_stuff_documents_chain(
        llm, prompt, document_prompt=WindowDocumentPrompt("title")
    )

    chain = create_retrieval_chain(sample_retriever(), answer)
    result = chain.invoke({"input": given.question})
    print(f"> {given.question}\n{result['answer']}")
    print(f"  from {len(result['context'])} documents")


if __name__ == "__main__":
    main()
