"""A LlamaIndex query engine whose nodes are windows of a local model.

Run it with `python examples/llama_index_query_engine.py [--model MODEL] [--question QUESTION]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples. Any retriever of LlamaIndex serves, such as `index.as_retriever()` of a vector store.
"""

import argparse

from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine

from llama_index.llms.rag_windows import (
    RagWindowsLLM,
    WindowOrderPostprocessor,
    WindowSynthesizer,
)
from llama_index.retrievers.rag_windows import RagWindowsRetriever
from rag_windows.samples import sample_questions, samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

# The shipped reader answers bare questions; leave the template out for an instruction-tuned model.
BARE = PromptTemplate("{context_str}\n{query_str}")


def main() -> None:
    """Retrieve, leave duplicates out, answer, and show what carried the answer."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("--question", default=sample_questions()[0])
    given = options.parse_args()
    loaded = load_documents([samples_path() / "corpus"], root=samples_path())
    bm25 = BM25Retriever(split_documents(loaded.documents))
    llm = RagWindowsLLM(given.model, max_new_tokens=32)
    engine = RetrieverQueryEngine(
        RagWindowsRetriever(bm25, similarity_top_k=16),
        response_synthesizer=WindowSynthesizer(llm, text_qa_template=BARE),
        node_postprocessors=[WindowOrderPostprocessor()],
    )
    response = engine.query(given.question)
    print(f"> {given.question}\n{response}")
    by_mass = sorted(response.source_nodes, key=lambda one: -one.metadata["attention_mass"])
    for source in by_mass[:3]:
        print(f"  {source.metadata['attention_mass']:.0%} of the attention: {source.node_id}")


if __name__ == "__main__":
    main()
