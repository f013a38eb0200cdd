"""Office files, web pages, books, tables and e-mails as Markdown: what a reader sees of them.

Tables stay tables; sheets, slides and chapters begin with a heading. Nothing outside a file is
opened, and no script, macro or formula of it runs. `LIMITS` bound what a hostile file can cost.
Tables of values, books and e-mails are read here.
"""

from __future__ import annotations

import csv
import email
import email.errors
import email.policy
import io
import itertools
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from email.header import decode_header, make_header
from email.message import Message
from email.utils import parsedate_to_datetime
from urllib.parse import unquote
from xml.etree import ElementTree

from rag_windows.errors import DocumentError, require
from rag_windows_retrievers import conversion
from rag_windows_retrievers.conversion import (
    Converted,
    Decoded,
    LeftOut,
    SheetRows,
    cut_behind,
    one_line,
    reading,
    sheet_of,
)
from rag_windows_retrievers.office_files import Package, docx, pptx, xlsx
from rag_windows_retrievers.structure import structure_of
from rag_windows_retrievers.web_pages import html, html_text, page_of


def convert(data: bytes, suffix: str, decoded: Decoded) -> Converted:
    """A file's bytes as Markdown.

    Args:
        data: the whole file.
        suffix: a key of `FORMATS`.
        decoded: makes text of bytes whose encoding the file does not state.

    Raises:
        DocumentError: it is damaged, protected, or larger than `LIMITS`.
        MissingExtraError: a package that it takes is not installed.
        UnicodeDecodeError: it is text in another encoding than it says.
    """
    return FORMATS[suffix](data, decoded)


# Tables of values

_DELIMITERS = ",;\t|"
_SAMPLE = 100_000


def _delimiter(text: str) -> str:
    """What separates the cells: what gives the most rows the same number of them, above one."""

    def fitness(one: str) -> tuple[int, int]:
        rows = itertools.islice(csv.reader(io.StringIO(text, newline=""), delimiter=one), 100)
        widths = Counter(len(row) for row in rows if row)
        width, often = max(widths.items(), key=lambda item: (item[1], item[0]), default=(1, 0))
        return (often, width) if width > 1 else (0, 0)

    return max(_DELIMITERS, key=fitness)


def _delimited(data: bytes, decoded: Decoded) -> Converted:
    """A file of values between commas, semicolons, tabs or bars."""
    text, delimiter = decoded(data), ""
    if match := re.match(r"sep=([,;:|\t])\n", text):  # which Excel writes and reads
        text, delimiter = text[match.end() :], match[1]
    taken, left_out = SheetRows(), []
    try:
        delimiter = delimiter or _delimiter(text[: text.rfind("\n", 0, _SAMPLE) + 1] or text)
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter):
            if not taken.take(row):
                left_out.append(cut_behind("the table", len(taken.rows)))
                break
    except csv.Error as error:
        raise DocumentError(
            f"not a table of values that Python's csv can read ({error}); look for a quotation "
            "mark that is not closed"
        ) from error
    return Converted(sheet_of(taken.rows), left_out=left_out)


# Books

_BOOK = "EPUB"
_BOOK_TITLES = "{http://purl.org/dc/elements/1.1/}"


def _epub(data: bytes, decoded: Decoded) -> Converted:
    require("Reading EPUB files", "markdownify", "lxml", extra="formats")
    package = Package(data, _BOOK)
    missing: list[str] = []
    parts: list[str] = []
    with reading(_BOOK, "Python's zipfile"):
        roots = package.xml("META-INF/container.xml").iter()
        (path, *_) = (one.get("full-path") for one in roots if one.get("full-path"))
        book = package.xml(str(path))
        folder = posixpath.dirname(str(path))
        items = {
            one.get("id"): (_inside(folder, one.get("href")), one.get("properties") or "", one)
            for one in book.iter()
            if one.tag.endswith("}item")
        }
        stated: dict[str, list[str]] = {}
        for one in book.iter():
            if one.tag.startswith(_BOOK_TITLES) and (text := one_line(one.text or "")):
                stated.setdefault(one.tag.removeprefix(_BOOK_TITLES), []).append(text)
        protected = _protected(package)
        labels = _labels(package, items.values(), decoded)
        order = dict.fromkeys(
            one.get("idref") for one in book.iter() if one.tag.endswith("}itemref")
        )
        elements = 0
        for name in order:
            place, properties, _item = items.get(name, (str(name), "", None))
            if "nav" in properties.split():
                continue
            if place in protected:
                raise DocumentError("it is protected against copies; only its own reader opens it")
            if place not in package.names:
                missing.append(place)
                continue
            page = page_of(html_text(package.read(place), decoded))
            elements += page.elements
            if elements > conversion.LIMITS.elements:
                raise DocumentError(
                    f"its chapters have more than {conversion.LIMITS.elements:,} elements; split it"
                )
            text = page.text
            if text and place in labels and not structure_of(text).headings:
                text = f"# {labels[place]}\n\n{text}"
            parts.append(text)
    left_out = []
    if missing:
        reason = f"it has no {', '.join(missing[:3])}, which its contents name; save it again"
        left_out.append(LeftOut(reason, problem=True))
    known = {"author": "creator", "language": "language", "date": "date"}
    metadata = {ours: ", ".join(stated[name]) for ours, name in known.items() if name in stated}
    titles = stated.get("title", [])[:1]
    return Converted("\n\n".join(filter(None, parts)), titles, metadata, left_out, headed=True)


def _inside(folder: str, link: str | None) -> str:
    """The name of a part that another part in a folder links to."""
    return posixpath.normpath(posixpath.join(folder, unquote((link or "").partition("#")[0])))


def _protected(package: Package) -> set[str]:
    """The parts of a book that are encrypted; fonts often are."""
    if "META-INF/encryption.xml" not in package.names:
        return set()
    tree = package.xml("META-INF/encryption.xml")
    return {_inside("", one.get("URI")) for one in tree.iter() if one.get("URI")}


def _labels(
    package: Package,
    items: Iterable[tuple[str, str, ElementTree.Element]],
    decoded: Decoded,
) -> dict[str, str]:
    """What the table of contents calls the parts of a book."""
    from bs4 import BeautifulSoup

    labels: dict[str, str] = {}
    for place, properties, item in items:
        folder = posixpath.dirname(place)
        if place not in package.names:
            continue
        if "nav" in properties.split():
            soup = BeautifulSoup(html_text(package.read(place), decoded), "lxml")
            found = [(str(one["href"]), one.get_text()) for one in soup.select("nav a[href]")]
        elif item.get("media-type") == "application/x-dtbncx+xml":
            points = [one for one in package.xml(place).iter() if one.tag.endswith("}navPoint")]
            found = [
                (
                    next((one.get("src", "") for one in point if one.tag.endswith("content")), ""),
                    "".join(next(one for one in point if one.tag.endswith("navLabel")).itertext()),
                )
                for point in points
            ]
        else:
            continue
        for link, label in found:
            if label.strip():
                labels.setdefault(_inside(folder, link), one_line(label))
    return labels


# E-mails

_ENCRYPTED = ("multipart/encrypted", "application/pkcs7-mime", "application/x-pkcs7-mime")
# The parser of the newer policies takes minutes for some headers.
_MAIL = email.policy.compat32
_HEADERS = ("From", "To", "Cc", "Date")
_HEADER_CHARS = 10_000


def _eml(data: bytes, _: Decoded) -> Converted:
    """An e-mail; what is attached to it is named."""
    with reading("an e-mail", "Python's email"):
        message = email.message_from_bytes(data, policy=_MAIL)
        stated = {
            name: text
            for name in ("Subject", *_HEADERS)
            if (text := _header(dict(message.raw_items()), name))
        }
        if not stated:
            raise DocumentError(
                "its head has no From, To, Subject or Date; save it again as an e-mail"
            )
        mail = _Mail()
        text = mail.text(message)
    if mail.encrypted:
        raise DocumentError("it is encrypted; save it decrypted")
    if "Date" in stated:
        with suppress(ValueError, TypeError, IndexError, OverflowError):
            stated["Date"] = parsedate_to_datetime(stated["Date"]).isoformat(" ")
    lines = [f"{name}: {stated[name]}" for name in _HEADERS if name in stated]
    left_out = []
    if mail.attached:
        names = ", ".join(mail.attached)
        lines.append(f"Attachments: {names}")
        left_out.append(LeftOut(f"attachments are left out: {names}; save them beside it"))
    if mail.damaged:
        reason = f"{mail.damaged:,} of its characters are damaged; save it again"
        left_out.append(LeftOut(reason, problem=True))
    text = "\n\n".join(filter(None, ["\n".join(lines), text.strip()])) if text.strip() else ""
    metadata = {name.lower(): stated[name] for name in _HEADERS if name in stated}
    return Converted(text, [stated.get("Subject")], metadata, left_out)


def _header(headers: Mapping[str, str], name: str) -> str:
    """A header's text, in whatever way its other letters are written."""
    value = next((str(text) for key, text in headers.items() if key.lower() == name.lower()), "")
    raw = one_line(value[:_HEADER_CHARS]).encode("utf-8", "surrogateescape")
    text = raw.decode("utf-8", "replace")
    with suppress(ValueError, LookupError, email.errors.MessageError):
        text = str(make_header(decode_header(text)))
    return one_line(text)


class _Mail:
    """Reads the parts of an e-mail."""

    def __init__(self) -> None:
        self.attached: list[str] = []
        self.damaged = 0
        self.encrypted = False

    def text(self, part: Message) -> str:
        """What a part says; of several forms of the same, the plain text."""
        kind = part.get_content_type()
        self.encrypted |= kind in _ENCRYPTED
        if part.get_content_maintype() == "multipart":
            parts = [one for one in part.get_payload() or () if isinstance(one, Message)]
            if kind == "multipart/alternative":
                parts.sort(key=lambda one: one.get_content_type() != "text/plain")
                return next(filter(str.strip, map(self.text, parts)), "")
            return "\n\n".join(filter(str.strip, map(self.text, parts)))
        name = _header({"name": part.get_filename() or ""}, "name")
        if (
            name
            or kind not in ("text/plain", "text/html")
            or (part.get_content_disposition() == "attachment")
        ):
            self.attached.append(name or f"one of type {kind}")
            return ""
        text = self._decoded(part)
        return page_of(text).text if kind == "text/html" else text

    def _decoded(self, part: Message) -> str:
        payload = part.get_payload(decode=True)
        data = payload if isinstance(payload, bytes) else b""
        for encoding in (part.get_content_charset() or "utf-8", "utf-8"):
            with suppress(LookupError, ValueError):
                return data.decode(encoding)
        text = data.decode("utf-8", "replace")
        self.damaged += text.count("\ufffd")
        return text


FORMATS: Mapping[str, Callable[[bytes, Decoded], Converted]] = {
    ".docx": docx,
    ".pptx": pptx,
    ".xlsx": xlsx,
    ".html": html,
    ".htm": html,
    ".epub": _epub,
    ".csv": _delimited,
    ".tsv": _delimited,
    ".eml": _eml,
}
"""By the suffixes of files, what reads them."""
