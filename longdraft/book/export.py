"""Exports of a text with chapters: Markdown, and EPUB 3 with reproducible bytes.

    book = ExportedBook("A Title", [ExportedChapter("One", "First paragraph.\\n\\nSecond paragraph.")])
    Path("book.md").write_text(markdown(book))
    Path("book.epub").write_bytes(epub(book))

It is a module of its own so that everything that has a text to export can use it: `longdraft book` and the server's
page. It needs no package.

Equal books are equal bytes: an EPUB holds no time of its making, its identifier is a hash of its content, and its files
are stored without compression, because compressors differ.
"""

from __future__ import annotations

import hashlib
import io
import re
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from html import escape
from itertools import chain, islice
from typing import NamedTuple

from longdraft.errors import UsageError

_HEADING = re.compile(r"^##?[ \t]+(\S.*)$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n\s*\n")
MAX_CHAPTERS = 2000  # of a text that is cut at its headings: each takes a file of the archive and 1 KB of page
_BLOCK = 1 << 16  # characters that are escaped at once, so that other threads of a server can run between
_TITLE = 60  # characters of a title that is made of the first words
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

    Raises UsageError for too many headings.
    """
    headings = list(islice(_HEADING.finditer(text), MAX_CHAPTERS + 1))
    if len(headings) > MAX_CHAPTERS:
        raise UsageError(f"the text has more than {MAX_CHAPTERS:,} headings, of which each begins a chapter; export it "
                         "in parts", "text")
    ends = [*(heading.start() for heading in headings), len(text)]
    pieces = [text[: ends[0]]]  # text, heading, text, heading, text ...
    for heading, end in zip(headings, ends[1:], strict=True):
        pieces += heading[1], text[heading.end() : end]
    chapters = [ExportedChapter(_line(heading), body) for heading, body in zip(pieces[1::2], pieces[2::2], strict=True)]
    if pieces[0].strip() or not chapters:
        chapters.insert(0, ExportedChapter("", pieces[0]))
    elif not title and len(chapters) > 1 and not chapters[0].text.strip():
        title = chapters.pop(0).title
    return ExportedBook(title, chapters, author, language)


def markdown(book: ExportedBook) -> str:
    """The book as Markdown: a heading for the title and one for each chapter. The text is not escaped."""
    return b"".join(markdown_pieces(book)).decode(errors="surrogatepass")


def markdown_pieces(book: ExportedBook) -> Iterator[bytes]:
    """The same in UTF-8, a chapter at a time."""
    separator = ""
    for number, chapter in enumerate(book.chapters or [ExportedChapter("", "")]):
        parts = [f"# {_line(book.title)}"] if book.title and number == 0 else []
        parts += [f"## {_line(chapter.title)}"] if chapter.title else []
        parts += paragraphs(chapter.text)
        if parts:
            yield (separator + "\n\n".join(parts)).encode(errors="surrogatepass")
            separator = "\n\n"
    yield b"\n"


def epub(book: ExportedBook) -> bytes:
    """The book as an EPUB 3 file."""
    return b"".join(epub_pieces(book))


def epub_pieces(book: ExportedBook) -> Iterator[bytes]:
    """The same, a file of the archive at a time. Each page is made twice: first for the identifier.

    A book without a title has the first words of its text for one, because EPUB demands a title.
    """
    names = [f"chapter-{number:04d}" for number in range(1, len(book.chapters) + 1)]
    language, title = _xml(book.language), _xml(_title(book))

    def pages() -> Iterator[str]:
        for i, chapter in enumerate(book.chapters):
            yield _PAGE.format(language=language, title=_xml(_heading(book, i)), body=_body(chapter))

    entries = "\n".join(f'<li><a href="{name}.xhtml">{_xml(_heading(book, i))}</a></li>'
                        for i, name in enumerate(names))
    nav = f'<nav epub:type="toc" id="toc"><h1>{title}</h1><ol>\n{entries}\n</ol></nav>'
    digest = hashlib.sha256("\0".join((book.title, book.author, book.language)).encode(errors="replace"))
    for page in pages():
        digest.update(b"\0" + page.encode(errors="replace"))
        yield b""
    package = _PACKAGE.format(
        language=language, title=title, identifier=uuid.UUID(bytes=digest.digest()[:16], version=5), modified=_MODIFIED,
        creator=f"<dc:creator>{_xml(_line(book.author))}</dc:creator>\n" if book.author else "",
        items="\n".join(f'<item id="{name}" href="{name}.xhtml" media-type="application/xhtml+xml"/>'
                        for name in names),
        spine="\n".join(f'<itemref idref="{name}"/>' for name in names))
    files = chain((("mimetype", "application/epub+zip"),  # comes first, as the format demands
                   ("META-INF/container.xml", _CONTAINER), ("OEBPS/package.opf", package),
                   ("OEBPS/nav.xhtml", _PAGE.format(language=language, title=title, body=nav))),
                  zip((f"OEBPS/{name}.xhtml" for name in names), pages(), strict=True))
    out = _Pieces()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in files:
            info = zipfile.ZipInfo(name, _TIME)
            info.create_system, info.external_attr = 3, 0o644 << 16  # the same on every system
            archive.writestr(info, content.encode())
            yield out.take()
    yield out.take()


class _Pieces(io.BytesIO):
    """A file in memory whose beginning can be taken away. `zipfile` goes back within its latest entry only."""

    _taken = 0  # bytes

    def take(self) -> bytes:
        """The bytes since the last call."""
        piece = self.getvalue()
        self._taken += len(piece)
        super().seek(0)
        self.truncate()
        return piece

    def tell(self) -> int:
        return self._taken + super().tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._taken + super().seek(offset - self._taken if whence == io.SEEK_SET else offset, whence)


def paragraphs(text: str) -> Iterator[str]:
    """The paragraphs of a text, without blank lines and outer white space."""
    text, start = text.replace("\r\n", "\n"), 0
    for blank in chain(_BLANK_LINES.finditer(text), [None]):
        if part := text[start : blank.start() if blank else len(text)].strip():
            yield part
        start = blank.end() if blank else start


def _title(book: ExportedBook) -> str:
    """The title, or the book's first words; never empty."""
    if title := _line(book.title):
        return title
    texts = (text for chapter in book.chapters
             for text in (chapter.title, *islice(paragraphs(chapter.text[:_BLOCK]), 1)))
    line = next(filter(None, map(_line, texts)), "Untitled")
    return line if len(line) <= _TITLE else f"{line[:_TITLE].rpartition(' ')[0] or line[:_TITLE]}…"


def _heading(book: ExportedBook, index: int) -> str:
    return _line(book.chapters[index].title) or (_title(book) if len(book.chapters) == 1 else f"{index + 1}")


def _body(chapter: ExportedChapter) -> str:
    heading = [f"<h1>{_xml(_line(chapter.title))}</h1>"] if chapter.title else []
    texts = [f'<p dir="auto">{_xml(part, "<br/>")}</p>' for part in paragraphs(chapter.text)]
    return "\n".join([*heading, *texts]) or "<p></p>"


def _line(text: str) -> str:
    """The text on one line."""
    return " ".join(text.split())


def _xml(text: str, line_end: str = "") -> str:
    """The text in XML. line_end: before each end of a line"""
    blocks = (text[at : at + _BLOCK] for at in range(0, len(text), _BLOCK))
    return "".join(escape(_NOT_XML.sub("\ufffd", block)).replace("\n", f"{line_end}\n") for block in blocks)
