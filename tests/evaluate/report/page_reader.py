"""A page as the parser of the standard library reads it, independent of the code that wrote it."""

import json
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Elements in order as (name, attributes), the text in them, and mistakes in their nesting."""

    def __init__(self, html):
        super().__init__(convert_charrefs=True)
        self.elements, self.mistakes, self.texts, self.scripts = [], [], [], []
        self._open = []
        self.feed(html)
        self.close()
        self.mistakes += [f"{name} is never closed" for name in self._open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        if not self._open or self._open[-1] != tag:
            self.mistakes.append(f"</{tag}> closes {self._open[-1:]}")
        else:
            self._open.pop()

    def handle_data(self, data):
        if self._open and self._open[-1] == "script":
            self.scripts[-1][1] += data
        elif self._open and self._open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self):
        """Everything that can be read, with single spaces."""
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self):
        """The data that the charts are drawn from."""
        return json.loads(next(text for attributes, text in self.scripts if attributes.get("id") == "report-data"))

    def find(self, name=None, **attributes):
        """Attributes of the elements that have these."""
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        return [
            known
            for tag, known in self.elements
            if (name is None or tag == name) and all(known.get(key) == value for key, value in wanted.items())
        ]
