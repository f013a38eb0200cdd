"""A LlamaIndex chat engine whose nodes are windows of a local model.

Run it with `python examples/llama_index_chat_engine.py [--model MODEL] [QUESTION ...]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples. LlamaIndex's own `ContextChatEngine` keeps nodes apart too, once
`Settings.prompt_helper = WindowPromptHelper()` is set; this one tells the attention masses as well.
"""

import argparse

from llama_index.llms.rag_windows import RagWindowsLLM, WindowContextChatEngine
from llama_index.retrievers.rag_windows import RagWindowsRetriever
from rag_windows.samples import sample_questions, samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents


def main() -> None:
    """Ask the questions one after the other; each sees the conversation so far."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("questions", nargs="*", metavar="QUESTION")
    given = options.parse_args()
    loaded = load_documents([samples_path() / "corpus"], root=samples_path())
    retriever = RagWindowsRetriever(BM25Retriever(split_documents(loaded.documents)), 16)
    llm = RagWindowsLLM(given.model, max_new_tokens=32)
    # The shipped reader answers bare questions; leave the template out for other models.
    engine = WindowContextChatEngine.from_defaults(
        retriever, llm=llm, context_template="{context_str}"
    )
    for question in given.questions or sample_questions()[:2]:
        response = engine.chat(question)
        print(f"> {question}\n{response}")
        for source in response.source_nodes:
            if source.metadata["attention_mass"] > 0.1:
                print(
                    f"  {source.metadata['attention_mass']:.0%} of the attention: {source.node_id}"
                )


if __name__ == "__main__":
    main()
