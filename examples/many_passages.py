"""One question over many passages, with windows and sequentially, and what each passage got.

Run it with `python examples/many_passages.py`; it needs no network.
"""

from rag_windows import APE, PCW, Passage, Sequential, WindowedLM
from rag_windows.methods import Method

PEOPLE = ("Aldan Pellby", "Corra Wendgate", "Vara Zelmont", "Elven Everane")
TOWNS = ("Birholm", "Sulava", "Kariente", "Velmouth")
INSTRUMENTS = ("cello", "harp", "flute", "piano")
QUESTION = "Where was Corra Wendgate born?"


def passages() -> list[Passage]:
    """One invented person each."""
    rows = zip(PEOPLE, TOWNS, INSTRUMENTS, strict=True)
    return [
        Passage(f"{name} plays the {instrument}. {name} was born in {town}.", id=name, title=name)
        for name, town, instrument in rows
    ]


def main() -> None:
    """Ask the same question with three methods."""
    lm = WindowedLM.from_pretrained("tiny-reader")
    methods: list[Method] = [Sequential(), PCW(), APE(temperature=0.9, scale=0.9)]
    print(QUESTION)
    for method in methods:
        answer = lm.generate(QUESTION, passages(), method=method, max_new_tokens=16)
        print(f"\n{method.name}: {answer.text}  ({answer.timings.ttft_s:.3f} s to the first token)")
        for citation in answer.citations or ():
            print(f"  {citation.mass:5.1%}  {citation.id}")


if __name__ == "__main__":
    main()
