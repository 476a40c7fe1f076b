"""Exports of a text with chapters: Markdown, and EPUB 3 with reproducible bytes.

    book = ExportedBook("A Title", [ExportedChapter("One", "First paragraph.\\n\\nSecond paragraph.")])
    Path("book.md").write_text(markdown(book))
    Path("book.epub").write_bytes(epub(book))

It is a module of its own so that everything that has a text to export can use it: `longdraft book` and the server's
page. It needs no other part of longdraft and no package.

Equal books are equal bytes: an EPUB holds no time of its making, its identifier is a hash of its content, and its files
are stored without compression, because compressors differ.
"""

from __future__ import annotations

import hashlib
import io
import re
import uuid
import zipfile
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

_HEADING = re.compile(r"^##?[ \t]+(\S.*)$", re.MULTILINE)
_TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that a ZIP archive can hold
_MODIFIED = "1980-01-01T00:00:00Z"  # EPUB wants a time
# Characters that XML 1.0 does not allow.
_NOT_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")
_CONTAINER = """<?xml version="1.0" encoding="UTF-8"?>
<container version="1.0" xmlns="urn:oasis:names:tc:opendocument:xmlns:container">
<rootfiles><rootfile full-path="OEBPS/package.opf" media-type="application/oebps-package+xml"/></rootfiles>
</container>
"""
_PAGE = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" xmlns:epub="http://www.idpf.org/2007/ops" lang="{language}"
xml:lang="{language}">
<head><title>{title}</title></head>
<body>
{body}
</body>
</html>
"""
_PACKAGE = """<?xml version="1.0" encoding="UTF-8"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0" unique-identifier="id" xml:lang="{language}">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:identifier id="id">urn:uuid:{identifier}</dc:identifier>
<dc:title>{title}</dc:title>
<dc:language>{language}</dc:language>
{creator}<meta property="dcterms:modified">{modified}</meta>
</metadata>
<manifest>
<item id="nav" href="nav.xhtml" media-type="application/xhtml+xml" properties="nav"/>
{items}
</manifest>
<spine>
{spine}
</spine>
</package>
"""


class ExportedChapter(NamedTuple):
    """A chapter: its title ("": none) and its text, whose paragraphs are separated by blank lines."""

    title: str
    text: str


class ExportedBook(NamedTuple):
    """A book. language: a BCP 47 tag, such as "en"; author: "" for none"""

    title: str
    chapters: Sequence[ExportedChapter]
    author: str = ""
    language: str = "en"


def parse_chapters(text: str, title: str = "", author: str = "", language: str = "en") -> ExportedBook:
    """A text cut at its Markdown headings (# or ##, each on a line of its own); without any it is one chapter.

    A heading in front of the text is its title if none is given, and if a chapter's heading follows at once.
    """
    pieces = _HEADING.split(text)  # text, heading, text, heading, text ...
    chapters = [ExportedChapter(_line(heading), body) for heading, body in zip(pieces[1::2], pieces[2::2], strict=True)]
    if pieces[0].strip() or not chapters:
        chapters.insert(0, ExportedChapter("", pieces[0]))
    elif not title and len(chapters) > 1 and not chapters[0].text.strip():
        title = chapters.pop(0).title
    return ExportedBook(title, chapters, author, language)


def markdown(book: ExportedBook) -> str:
    """The book as Markdown: a heading for the title and one for each chapter. The text is not escaped."""
    parts = [f"# {_line(book.title)}"] if book.title else []
    for chapter in book.chapters:
        parts += [f"## {_line(chapter.title)}"] if chapter.title else []
        parts += paragraphs(chapter.text)
    return "\n\n".join(parts) + "\n"


def epub(book: ExportedBook) -> bytes:
    """The book as an EPUB 3 file."""
    names = [f"chapter-{number:04d}" for number in range(1, len(book.chapters) + 1)]
    language, title = _xml(book.language), _xml(_line(book.title))
    pages = {name: _PAGE.format(language=language, title=_xml(_heading(book, i)), body=_body(chapter))
             for i, (name, chapter) in enumerate(zip(names, book.chapters, strict=True))}
    entries = "\n".join(f'<li><a href="{name}.xhtml">{_xml(_heading(book, i))}</a></li>'
                        for i, name in enumerate(names))
    nav = f'<nav epub:type="toc" id="toc"><h1>{title}</h1><ol>\n{entries}\n</ol></nav>'
    digest = hashlib.sha256("\0".join((book.title, book.author, book.language, *pages.values())).encode(
        errors="replace")).digest()
    package = _PACKAGE.format(
        language=language, title=title, identifier=uuid.UUID(bytes=digest[:16], version=5), modified=_MODIFIED,
        creator=f"<dc:creator>{_xml(_line(book.author))}</dc:creator>\n" if book.author else "",
        items="\n".join(f'<item id="{name}" href="{name}.xhtml" media-type="application/xhtml+xml"/>'
                        for name in names),
        spine="\n".join(f'<itemref idref="{name}"/>' for name in names))
    files = {"mimetype": "application/epub+zip", "META-INF/container.xml": _CONTAINER, "OEBPS/package.opf": package,
             "OEBPS/nav.xhtml": _PAGE.format(language=language, title=title, body=nav),
             **{f"OEBPS/{name}.xhtml": page for name, page in pages.items()}}
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files.items():  # `mimetype` comes first, as the format demands
            info = zipfile.ZipInfo(name, _TIME)
            info.create_system, info.external_attr = 3, 0o644 << 16  # the same on every system
            archive.writestr(info, content.encode())
    return out.getvalue()


def paragraphs(text: str) -> list[str]:
    """The paragraphs of a text, without blank lines and outer white space."""
    return [part.strip() for part in re.split(r"\n\s*\n", text.replace("\r\n", "\n")) if part.strip()]


def _heading(book: ExportedBook, index: int) -> str:
    return _line(book.chapters[index].title) or f"{index + 1}"


def _body(chapter: ExportedChapter) -> str:
    heading = [f"<h1>{_xml(_line(chapter.title))}</h1>"] if chapter.title else []
    texts = [f'<p dir="auto">{_xml(part)}</p>'.replace("\n", "<br/>\n") for part in paragraphs(chapter.text)]
    return "\n".join([*heading, *texts]) or "<p></p>"


def _line(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


def _xml(text: str) -> str:
    return escape(_NOT_XML.sub("\ufffd", text))
