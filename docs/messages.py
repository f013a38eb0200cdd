"""Every message of the packages, read from their source: for the page "All messages" and tests.

mkdocs.yml names this file as a hook. Nothing of the packages is imported.
"""

from __future__ import annotations

import ast
import functools
import html
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("rag_windows", "retrievers", "integrations")
MARK = "<!-- messages -->"
OPEN = "…"
"""What stands in a message for a name, a number or a list that is known only when it is shown."""

OPTIONS, NOTES = "Options of the command line", "Notes and warnings"
_SHOWN = {
    **dict.fromkeys(("warning", "warn", "tell", "Note", "_report"), NOTES),
    "BadParameter": OPTIONS,
}
"""What shows a message without being an error of ours, by the last part of its name."""

_INSIDE = ("FormatError", "PrefillCancelledError")
"""Errors that do not reach a user: the file is deleted, the question was given up."""


@dataclass(frozen=True, slots=True)
class Message:
    """A message, with `OPEN` for its open parts, and its kind: an error's class or a heading."""

    kind: str
    text: str


@functools.cache
def messages() -> tuple[Message, ...]:
    """All of them, each once, by kind and in alphabetical order."""
    found: dict[Message, None] = {}
    for tree in _trees().values():
        for function, call in _calls(tree):
            for one in _messages(function, call):
                found[one] = None
    kinds = [*errors(), OPTIONS, NOTES]

    def place(one: Message) -> tuple[int, str]:
        return kinds.index(one.kind), re.sub(r"^\W+", "", one.text).lower()

    return tuple(sorted(found, key=place))


@functools.cache
def errors() -> dict[str, str]:
    """The classes that derive from RagWindowsError, with the first lines of their docstrings."""

    def ours(name: str) -> bool:
        return name == "RagWindowsError" or any(map(ours, _bases().get(name, ())))

    return {
        name: (ast.get_docstring(one) or "").partition("\n")[0]
        for name, one in _classes().items()
        if ours(name) and not name.startswith("_") and name not in _INSIDE
    }


@functools.cache
def _classes() -> dict[str, ast.ClassDef]:
    nodes = itertools.chain.from_iterable(map(ast.walk, _trees().values()))
    return {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}


@functools.cache
def _bases() -> dict[str, list[str]]:
    return {name: [ast.unparse(base) for base in one.bases] for name, one in _classes().items()}


@functools.cache
def _trees() -> dict[Path, ast.Module]:
    """The modules; those that define errors come first."""
    files = [file for room in ROOMS for file in sorted((ROOT / room).rglob("*.py"))]
    files.sort(key=lambda file: file.name != "errors.py")
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def _calls(tree: ast.AST, function: ast.AST | None = None) -> Iterator[tuple[Any, ast.Call]]:
    """The calls in a tree, each with the function around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield function, node
        inside = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else function
        yield from _calls(node, inside)


def _messages(function: ast.AST | None, call: ast.Call) -> Iterator[Message]:
    """What a call shows, if it makes an error of ours, a warning or a note."""
    name = ast.unparse(call.func).rpartition(".")[2]
    if name.startswith("_") and _bases().get(name):
        name = _bases()[name][0]
    extra = [one.value for one in call.keywords if one.arg == "extra"]
    if name == "require" and extra:
        what, *packages = map(_Reader(function).text, call.args)
        verb, pip = "is" if len(packages) == 1 else "are", _pip(_Reader(function).text(extra[0]))
        needed = f"{', '.join(packages)}, which {verb} not installed"
        yield Message("MissingExtraError", f"{what} needs {needed}; run: {pip}")
        return
    kind = name if name in errors() else _SHOWN.get(name)
    for text in _Reader(function).texts(call.args) if kind else ():
        words = " ".join(text.split())
        # Parts of other messages begin so; fewer words are a name or a kind.
        whole = not words.startswith("it ") and len(re.findall(r"[A-Za-z']{3,}", words)) > 2
        if whole and (name != "tell" or re.match("(Note|Error): [A-Z]", words)):
            yield Message(str(kind), words)


@functools.cache
def strings() -> frozenset[str]:
    """Every text in the source as it is shown, messages among them."""
    return frozenset(
        " ".join(_Reader(None).text(node).split())
        for tree in _trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.JoinedStr)
    )


class _Reader:
    """Reads the text that an expression inside a function stands for."""

    def __init__(self, function: ast.AST | None) -> None:
        self._known = dict(_constants())
        for node in ast.walk(function) if function is not None else ():
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                self._known[node.targets[0].id] = node.value

    def texts(self, arguments: list[ast.expr]) -> list[str]:
        """The texts of arguments; what a function of the same name returns, where one is called."""
        found = []
        for node in arguments:
            made = _functions().get(ast.unparse(node.func)) if isinstance(node, ast.Call) else None
            for one in ast.walk(made) if made is not None else ():
                if isinstance(one, ast.Return) and one.value is not None:
                    found.append(_Reader(made).text(one.value))
            found.append(self.text(node))
        return found

    def text(self, node: ast.expr) -> str:
        """The text; `OPEN` where only a run can tell."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value.replace("%s", OPEN).replace("%d", OPEN)
        if isinstance(node, ast.JoinedStr):
            return "".join(map(self.text, node.values)).replace(OPEN * 2, OPEN)
        if isinstance(node, ast.FormattedValue):
            shown = self.text(node.value)
            return f"'{OPEN}'" if node.conversion == ord("r") and shown == OPEN else shown
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left) + self.text(node.right)
        if isinstance(node, ast.Name):
            named = self._known.get(node.id)
            return self.text(named) if isinstance(named, ast.Constant | ast.JoinedStr) else OPEN
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return self.text(node.func.value) if node.func.attr == "strip" else OPEN
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "install":
            return _pip(self.text(node.args[0]))
        return OPEN


@functools.cache
def _constants() -> dict[str, ast.expr]:
    """What modules assign at their top, by name."""
    return {
        node.targets[0].id: node.value
        for tree in _trees().values()
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }


@functools.cache
def _functions() -> dict[str, ast.FunctionDef]:
    """Functions of modules whose name begins with an underscore, by name."""
    return {
        node.name: node
        for tree in _trees().values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("_")
    }


def _pip(extra: str) -> str:
    return f'pip install "rag-windows[{extra}]"'


def lines() -> Iterator[str]:
    """Lines of Markdown: each kind with its messages."""
    for kind, some in itertools.groupby(messages(), key=lambda one: one.kind):
        yield f"\n## {kind}\n"
        if kind in errors():
            yield f"{errors()[kind]}\n"
        for one in some:
            yield f"- {html.escape(one.text, quote=False)}".replace("*", r"\*").replace("_", r"\_")


def on_page_markdown(markdown: str, **kwargs: Any) -> str:
    """Put the messages in the place of the mark."""
    return markdown.replace(MARK, "\n".join(lines())) if MARK in markdown else markdown
