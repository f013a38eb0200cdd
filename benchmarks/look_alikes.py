"""Questions over records that are written alike, for `rag-windows eval passages`.

    python benchmarks/look_alikes.py 100 --out look_alikes.jsonl
    rag-windows eval passages --data look_alikes.jsonl --passages 4,8,16 --model MODEL

Each question brings sixteen records of one kind that differ in names and numbers alone, such as
the offices of a company or the entries of a price list, and asks for one field of one of them. A
reader that mixes up passages answers with another record's field.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

RECORDS = 16

CITIES = (
    *("Lisbon", "Oslo", "Vienna", "Turin", "Ghent", "Porto", "Malmo", "Bergen", "Leipzig", "Graz"),
    *("Lyon", "Seville", "Cork", "Bristol", "Tampere", "Aarhus", "Krakow", "Basel", "Utrecht"),
    *("Dresden", "Nantes", "Gdansk", "Verona", "Tartu"),
)
FIRST = (
    *("Ada", "Bruno", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Irene", "Jonas"),
    *("Karin", "Leo", "Marta", "Nils", "Olga", "Paul", "Rosa", "Simon", "Teresa", "Victor"),
)
LAST = (
    *("Brandt", "Costa", "Dahl", "Evans", "Fischer", "Garcia", "Hansen", "Ivanov", "Jensen"),
    *("Keller", "Lund", "Moreau", "Novak", "Olsen", "Pereira", "Quinn", "Rossi", "Schmidt"),
    *("Torres", "Urban", "Vogel", "Weber", "Young", "Zeman"),
)
PARTS = (
    *("gasket", "bearing", "coupling", "valve", "bracket", "spindle", "bushing", "flange"),
    *("rotor", "clamp", "washer", "piston", "nozzle", "spring", "sensor", "relay", "fuse"),
    *("pulley", "lever", "hinge", "shaft", "gear", "hose", "filter"),
)
COLOURS = ("red", "blue", "green", "grey", "white", "black", "yellow", "brown")
SUBJECTS = (
    *("Algebra", "Botany", "Chemistry", "Drawing", "Ethics", "French", "Geology", "History"),
    *("Italian", "Journalism", "Latin", "Music", "Nursing", "Optics", "Physics", "Rhetoric"),
    *("Statistics", "Theatre", "Zoology", "Logic", "Painting", "Greek", "Astronomy", "Anatomy"),
)

Fields = dict[str, str]

KINDS: tuple[tuple[tuple[str, ...], str, str, dict[str, str]], ...] = (
    (
        CITIES,
        "{key} office",
        "The {key} office is led by {person}. It has {number} employees and opened in {year}. "
        "Visitors report at the {colour} door; the deputy is {other}.",
        {
            "Who leads the {key} office?": "{person}",
            "How many employees does the {key} office have?": "{number}",
            "In which year did the {key} office open?": "{year}",
            "Who is the deputy at the {key} office?": "{other}",
        },
    ),
    (
        PARTS,
        "{key}",
        "The {key} costs {number} euros and is kept on the {colour} shelf. It has been made since "
        "{year}; questions go to {person}.",
        {
            "How much does the {key} cost?": "{number}",
            "On which shelf is the {key} kept?": "{colour}",
            "Since when has the {key} been made?": "{year}",
            "Who answers questions about the {key}?": "{person}",
        },
    ),
    (
        SUBJECTS,
        "Course: {key}",
        "The course in {key} is taught by {person} and takes place in room {number}. It was first "
        "given in {year}; papers are handed in to {other}.",
        {
            "Who teaches the course in {key}?": "{person}",
            "In which room does the course in {key} take place?": "{number}",
            "When was the course in {key} first given?": "{year}",
            "To whom are papers of the course in {key} handed in?": "{other}",
        },
    ),
)
"""Names, title, text, and questions with their answers, each of one kind of record."""


def question(rng: random.Random) -> dict[str, object]:
    """One question with its records, the right one among them."""
    names, title, text, asked = rng.choice(KINDS)
    count = 2 * RECORDS
    people = rng.sample([f"{first} {last}" for first in FIRST for last in LAST], count)
    numbers, years = rng.sample(range(101, 990), RECORDS), rng.sample(range(1950, 2024), RECORDS)
    records: list[Fields] = [
        {
            "key": key,
            "person": people[at],
            "other": people[RECORDS + at],
            "number": str(numbers[at]),
            "year": str(years[at]),
            "colour": rng.choice(COLOURS),
        }
        for at, key in enumerate(rng.sample(names, RECORDS))
    ]
    right, wanted = rng.randrange(RECORDS), rng.choice(sorted(asked))
    return {
        "question": wanted.format(**records[right]),
        "answers": [asked[wanted].format(**records[right])],
        "passages": [
            {"title": title.format(**one), "text": text.format(**one), "right": at == right}
            for at, one in enumerate(records)
        ],
    }


def main() -> None:
    """Write questions as JSON lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("questions", type=int, help="how many")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    lines = [json.dumps(question(rng), ensure_ascii=False) for _ in range(given.questions)]
    given.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
