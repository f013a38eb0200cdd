"""A conversation over passages, streamed; any local model serves.

Run it with `python examples/stream_a_conversation.py [MODEL]`, where MODEL is a folder or a name on
the Hub; without one, the shipped reader is used.
"""

import sys

from rag_windows import WindowedLM

PASSAGES = [
    {
        "title": "Port Ostholm",
        "text": "Port Ostholm lies on the river Brover. Port Ostholm is known for honey.",
    },
    {
        "title": "New Velmouth",
        "text": "New Velmouth lies on the river Kassa. New Velmouth is known for lace.",
    },
]
QUESTIONS = ("On which river does New Velmouth lie?", "What is Port Ostholm known for?")


def main() -> None:
    """Ask the questions one after the other; each sees the conversation so far."""
    lm = WindowedLM.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else "tiny-reader")
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        print(f"> {question}")
        messages.append({"role": "user", "content": question})
        answer = ""
        for chunk in lm.stream(messages, PASSAGES, max_new_tokens=32):
            print(chunk.text, end="", flush=True)
            answer += chunk.text
            if chunk.generation:
                usage = chunk.generation.usage
                print(f"  [{usage.prompt_tokens} tokens read, {usage.completion_tokens} written]")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
