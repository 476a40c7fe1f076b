"""Exports: Markdown, and EPUB files whose bytes depend on the book alone."""

from __future__ import annotations

import io
import zipfile
from xml.etree import ElementTree

import pytest

from longdraft.book.export import (
    ExportedBook,
    ExportedChapter,
    epub,
    epub_pieces,
    markdown,
    markdown_pieces,
    paragraphs,
    parse_chapters,
)

BOOK = ExportedBook("War & <Peace>", [
    ExportedChapter("One", "First line,\nsecond line.\n\n\n  Next paragraph. \x00\x1b\ud800\n"),
    ExportedChapter("", "שלום עולם\n\nمرحبا"),
    ExportedChapter("Empty", ""),
], author="A & B")
XHTML = "{http://www.w3.org/1999/xhtml}"


def test_paragraphs_are_separated_by_blank_lines():
    assert [*paragraphs("a\r\n\r\nb\nc\n \n\n d ")] == ["a", "b\nc", "d"] and [*paragraphs("\n \n")] == []


def test_markdown_has_a_heading_for_each_chapter_with_a_title():
    assert markdown(ExportedBook("T", [ExportedChapter("A\nB", "x\n\ny"), ExportedChapter("", "z")])) == (
        "# T\n\n## A B\n\nx\n\ny\n\nz\n")


def test_an_epub_has_the_parts_that_the_format_demands():
    archive = zipfile.ZipFile(io.BytesIO(epub(BOOK)))
    assert archive.testzip() is None
    first = archive.infolist()[0]
    assert first.filename == "mimetype" and first.compress_type == zipfile.ZIP_STORED and not first.extra
    assert archive.read("mimetype") == b"application/epub+zip" and epub(BOOK)[30:58] == b"mimetypeapplication/epub+zip"
    parsed = {name: ElementTree.fromstring(archive.read(name)) for name in archive.namelist()[1:]}
    package = parsed["OEBPS/package.opf"]
    listed = {item.get("href") for item in package.iter("{http://www.idpf.org/2007/opf}item")}
    assert {f"OEBPS/{name}" for name in listed} == set(parsed) - {"META-INF/container.xml", "OEBPS/package.opf"}
    spine = [item.get("idref") for item in package.iter("{http://www.idpf.org/2007/opf}itemref")]
    assert spine == ["chapter-0001", "chapter-0002", "chapter-0003"]
    links = [link.get("href") for link in parsed["OEBPS/nav.xhtml"].iter(f"{XHTML}a")]
    assert links == [f"{name}.xhtml" for name in spine]
    chapter = parsed["OEBPS/chapter-0001.xhtml"]
    assert chapter.find(f"{XHTML}body/{XHTML}h1").text == "One"
    texts = ["".join(part.itertext()) for part in chapter.iter(f"{XHTML}p")]
    assert texts[0] == "First line,\nsecond line." and texts[1].startswith("Next paragraph.") and len(texts) == 2


def test_equal_books_are_equal_bytes_and_others_have_another_identifier():
    assert epub(BOOK) == epub(BOOK)
    identifiers = {epub(book).partition(b"urn:uuid:")[2][:36] for book in (BOOK, BOOK._replace(author=""))}
    assert len(identifiers) == 2


def test_a_book_is_made_a_chapter_at_a_time():
    """So that neither memory nor a server's thread holds the whole file."""
    book = ExportedBook("T", [ExportedChapter(str(i), "word & " * 1000) for i in range(50)])
    for pieces, whole in ((epub_pieces(book), epub(book)), (markdown_pieces(book), markdown(book).encode())):
        made = list(pieces)
        assert b"".join(made) == whole and max(map(len, made)) < len(whole) / 10 and len(made) > 50


@pytest.mark.parametrize("chapters", [0, 1200])
def test_books_of_any_length_are_exported(chapters):
    data = epub(ExportedBook("", [ExportedChapter(str(i), "word " * 80) for i in range(chapters)]))
    assert len(zipfile.ZipFile(io.BytesIO(data)).namelist()) == 4 + chapters


@pytest.mark.parametrize("text, title, chapters", [
    ("No heading.\n", "", [("", "No heading.\n")]),
    ("", "", [("", "")]),
    ("# Book\n\n## One\nA.\n## Two\nB.", "Book", [("One", "\nA.\n"), ("Two", "\nB.")]),
    ("# One\nA.\n# Two\nB.", "", [("One", "\nA.\n"), ("Two", "\nB.")]),
    ("Before.\n## One\nA # sign.\n### Part\nC.", "", [("", "Before.\n"), ("One", "\nA # sign.\n### Part\nC.")]),
])
def test_chapters_begin_at_markdown_headings(text, title, chapters):
    book = parse_chapters(text)
    assert book.title == title and [tuple(chapter) for chapter in book.chapters] == chapters
    assert parse_chapters(text, "Mine").title == "Mine"


def test_a_book_that_was_exported_as_markdown_is_read_back():
    book = ExportedBook("A book", [ExportedChapter("One", "A.\n\nB."), ExportedChapter("Two", "C.")])
    again = parse_chapters(markdown(book))
    assert again.title == book.title and markdown(again) == markdown(book)
