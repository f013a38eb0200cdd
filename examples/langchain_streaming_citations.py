"""An answer streamed token by token, with its sources at the end.

Run it with
`python examples/langchain_streaming_citations.py [--model MODEL] [--question QUESTION]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples.
"""

import argparse

from langchain_core.messages import AIMessageChunk

from langchain_rag_windows import ChatRagWindows
from rag_windows.samples import sample_questions, samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents


def main() -> None:
    """Print the pieces as they come, then the citations of the whole message."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("--question", default=sample_questions()[0])
    given = options.parse_args()
    loaded = load_documents([samples_path() / "corpus"], root=samples_path())
    retriever = BM25Retriever(split_documents(loaded.documents))
    llm = ChatRagWindows(model=given.model, temperature=0, max_tokens=32)
    documents = retriever.retrieve(given.question, 16)
    print(f"> {given.question}")
    whole = AIMessageChunk(content="")
    for chunk in llm.stream(given.question, documents=documents):
        print(chunk.content, end="", flush=True)
        whole += chunk
    print()
    for block in whole.content_blocks:
        if block["type"] != "text":
            continue
        for source in block.get("annotations", []):
            if source["type"] == "citation":
                print(f"  {source['title']}: {source['cited_text'][:60]}...")
    if whole.usage_metadata:
        print(f"  {whole.usage_metadata['total_tokens']} tokens")


if __name__ == "__main__":
    main()
