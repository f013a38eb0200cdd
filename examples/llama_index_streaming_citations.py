"""An answer of LlamaIndex streamed token by token, with its sources at the end.

Run it with
`python examples/llama_index_streaming_citations.py [--model MODEL] [--question QUESTION]`.
MODEL is a folder or a name on the Hub; without one, the shipped reader answers over the shipped
samples.
"""

import argparse
import asyncio

from llama_index.core.base.response.schema import AsyncStreamingResponse
from llama_index.core.prompts import PromptTemplate

from llama_index.llms.rag_windows import RagWindowsLLM, WindowSynthesizer
from llama_index.retrievers.rag_windows import RagWindowsRetriever
from rag_windows.samples import sample_questions, samples_path
from rag_windows_retrievers import BM25Retriever, load_documents, split_documents

# The shipped reader answers bare questions; leave the template out for an instruction-tuned model.
BARE = PromptTemplate("{context_str}\n{query_str}")


async def answer(model: str, question: str) -> None:
    """Print the pieces as they come, then the passages by the attention they got."""
    loaded = load_documents([samples_path() / "corpus"], root=samples_path())
    bm25 = BM25Retriever(split_documents(loaded.documents))
    nodes = await RagWindowsRetriever(bm25, similarity_top_k=16).aretrieve(question)
    llm = RagWindowsLLM(model, max_new_tokens=32)
    synthesizer = WindowSynthesizer(llm, text_qa_template=BARE, streaming=True)
    response = await synthesizer.asynthesize(question, nodes)
    print(f"> {question}")
    if isinstance(response, AsyncStreamingResponse):
        async for piece in response.async_response_gen():
            print(piece, end="", flush=True)
    print()
    by_mass = sorted(response.source_nodes, key=lambda one: -one.metadata["attention_mass"])
    for source in by_mass[:3]:
        mass, title = source.metadata["attention_mass"], source.metadata["title"]
        print(f"  {mass:.0%} of the attention: {title} ({source.node_id})")


def main() -> None:
    """Read the options and run."""
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="tiny-reader")
    options.add_argument("--question", default=sample_questions()[0])
    given = options.parse_args()
    asyncio.run(answer(given.model, given.question))


if __name__ == "__main__":
    main()
