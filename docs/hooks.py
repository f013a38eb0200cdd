"""What mkdocs does beyond its plugins: docstrings, tables of the command line's options.

mkdocs.yml names this file twice: as a hook of mkdocs and as an extension of griffe, which reads the
docstrings. Nothing here imports the engine; the command line's own modules load no torch.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import typer

ROOT = Path(__file__).resolve().parent.parent

_NAME = re.compile(r"(?<![`\w\[])`([A-Za-z_][\w.]*)`(?!`)")


@functools.cache
def documented() -> dict[str, str]:
    """Names as docstrings write them, short and full, and the names that docs/api gives them."""
    pages = "\n".join(
        page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "api").glob("*.md")
    )
    full = re.findall(r"^::: (\S+)$", pages, flags=re.MULTILINE)
    return {name: name for name in full} | {name.rpartition(".")[2]: name for name in full}


class Docstrings(griffe.Extension):
    """Links in docstrings, and the arguments behind ``**options: Unpack[Options]``.

    A name in single back-quotes that the reference describes becomes a link to it. So docstrings
    stay readable in a terminal: they write `generate` and `Citation.mass`.
    """

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Rewrite the docstrings of a whole package, before any is parsed."""
        for one in _objects(pkg):
            if isinstance(one, griffe.Function):
                _unpack(one)
            if one.docstring is not None:
                text = _NAME.sub(functools.partial(_linked, one), one.docstring.value)
                # "::" is reStructuredText's mark of a literal block, at the end of a line or alone.
                text = re.sub(r"^ *::$", "", text, flags=re.MULTILINE)
                one.docstring.value = re.sub(r"::$", ":", text, flags=re.MULTILINE)


def _objects(owner: griffe.Object) -> Iterator[griffe.Object]:
    yield owner
    for member in owner.members.values():
        if isinstance(member, griffe.Object):
            yield from _objects(member)


def _unpack(function: griffe.Function) -> None:
    """Put the fields of a TypedDict in the place of ``**options: Unpack[Options]``."""
    for parameter in list(function.parameters):
        annotation = parameter.annotation
        if not isinstance(annotation, griffe.ExprSubscript) or str(annotation.left) != "Unpack":
            continue
        del function.parameters[parameter.name]
        options = function.resolve(str(annotation.slice))
        for name, field in function.modules_collection[options].attributes.items():
            kind = griffe.ParameterKind.keyword_only
            one = griffe.Parameter(name, annotation=field.annotation, kind=kind, default="...")
            function.parameters.add(one)


def _linked(owner: griffe.Object, found: re.Match[str]) -> str:
    target = _target(found[1], owner)
    return f"[{found[0]}][{target}]" if target else found[0]


def _target(name: str, owner: griffe.Object) -> str | None:
    """Where a name in an object's docstring leads, in the reference's names; None for nowhere."""
    family = owner if owner.is_class else owner.parent
    if family is not None and family.is_class and family.name in documented():
        member = family.members.get(name)
        if member is not None and member.has_docstring and member is not owner:
            return f"{documented()[family.name]}.{name}"
    if name == owner.name:
        return None
    head, _, tail = name.rpartition(".")
    if name in documented() or head not in documented():
        return documented().get(name)
    # Fields without a docstring of their own are described with their class.
    described = _class(documented()[head], owner)
    member = described.members.get(tail) if described is not None else None
    return documented()[head] + (f".{tail}" if member is not None and member.has_docstring else "")


def _class(path: str, owner: griffe.Object) -> griffe.Object | None:
    try:
        found = owner.modules_collection[path]
    except KeyError:
        return None
    return found.final_target if isinstance(found, griffe.Alias) else found


@functools.cache
def commands() -> dict[str, Any]:
    """The command line's commands by their words, "cache stats" for one."""
    sys.path[:0] = [str(ROOT)]
    from rag_windows.cli.commands import app

    def named(words: str, command: Any) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", {})
        for name, one in inner.items():
            yield from named(f"{words} {name}".strip(), one)
        if not inner:
            yield words, command

    return dict(named("", typer.main.get_command(app)))


def described(words: str) -> Iterator[str]:
    """Lines of Markdown: a command's heading, its help, and a folded table of its options."""
    command = commands()[words]
    context = typer.Context(command, info_name=f"rag-windows {words}")
    yield f"### rag-windows {words}\n"
    yield f"{_escaped(command.help)}\n"
    yield "<details markdown><summary>Options</summary>\n"
    yield "| option | meaning |"
    yield "|---|---|"
    for parameter in command.params:
        name, meaning = parameter.get_help_record(context)
        shown = re.sub(r"\s+", " ", _escaped(meaning))
        yield "| `{}` | {} |".format(name, shown.replace("|", r"\|"))
    yield "\n</details>"


def _escaped(text: str) -> str:
    return re.sub(r"([<*_\[])", r"\\\1", text)


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Put a command's help and options in the place of ``<!-- options: ask -->``."""
    if page.file.src_path.startswith("api/"):
        page.meta["search"] = {"boost": 0.5}  # pages that explain come before the reference
    mark = re.compile(r"^<!-- options: (.+) -->$", flags=re.MULTILINE)
    return mark.sub(lambda found: "\n".join(described(found[1])), markdown)


def on_post_page(output: str, **kwargs: Any) -> str:
    """Keep browsers from asking GitHub for the number of stars: nothing comes from elsewhere."""
    return output.replace(' data-md-component="source"', "")
