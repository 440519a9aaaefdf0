"""Reading a piece of HTML strictly: every tag that is opened is closed, in order."""

from __future__ import annotations

from html.parser import HTMLParser

VOID = {"input", "br", "img", "meta", "link", "hr", "col", "wbr", "source"}


class Page(HTMLParser):
    """tags: that were opened, in order. cells: the text of each row of tables. text: all of it. attributes: of each tag."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.cells: list[list[str]] = []
        self.text = ""
        self.attributes: list[tuple[str, dict[str, str | None]]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-1:] or 'nothing'}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._open and self._open[-1] in ("td", "th"):
            self.cells[-1][-1] += data


def read_html(text: str) -> Page:
    """The page; AssertionError if a tag is not closed, or another one is."""
    page = Page()
    page.feed(text)
    page.close()
    assert not page._open, f"never closed: {page._open}"
    return page
