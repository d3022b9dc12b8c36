"""HTML that cannot be broken by what is put into it: text is escaped unless it was made here."""

import html

Attribute = str | int | bool | None


class Html(str):
    """Text that is markup already. Only :func:`tag` and :func:`join` make it from anything else."""

    __slots__ = ()


def text(value: str) -> Html:
    """Escape anything that is not markup."""
    return value if isinstance(value, Html) else Html(html.escape(value, quote=True))


def tag(name: str, /, *children: str, **attributes: Attribute) -> Html:
    """An element.

    :param name: of the element, such as ``p``.
    :param children: text, which is escaped, or markup, which is not.
    :param attributes: an underscore in a name stands for a hyphen, one at its end for nothing (``class_``); None and
        False leave the attribute out, True gives it without a value.
    """
    written = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    opened = f"<{name}{written}>"
    return Html(opened if name in VOID else f"{opened}{join(*children)}</{name}>")


def join(*parts: str) -> Html:
    """Markup one after another; text among it is escaped."""
    return Html("".join(text(part) for part in parts))


def table(head: list[str], rows: list[list[str]], caption: str, numbers_from: int = 1) -> Html:
    """A table that scrolls sideways where it does not fit.

    :param head: names of the columns.
    :param rows: cells; the first of each row names it.
    :param caption: what the table shows, in one sentence.
    :param numbers_from: columns from this one on hold numbers and are set to the right.
    """
    kinds = [None if i < numbers_from else "number" for i in range(len(head))]
    top = join(*(tag("th", cell, scope="col", class_=kind) for cell, kind in zip(head, kinds, strict=True)))
    body = join(*(tag("tr", *_cells(row, kinds)) for row in rows))
    inside = join(tag("caption", caption), tag("thead", tag("tr", top)), tag("tbody", body))
    # A browser shrinks the whole page to the widest thing on it: paper gets on without tables that no paper can hold.
    look = "scroll" if len(head) <= MOST_ON_PAPER else "scroll screen"
    return tag("div", tag("table", inside), class_=look, tabindex=0, role="region", aria_label=caption)


def _cells(row: list[str], look: list[str | None]) -> list[Html]:
    first = tag("th", row[0], scope="row", class_=look[0])
    return [first, *(tag("td", cell, class_=kind) for cell, kind in zip(row[1:], look[1:], strict=True))]


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{html.escape(str(value), quote=True)}"'


MOST_ON_PAPER = 10  # columns
VOID = frozenset({"meta", "link", "br", "hr", "img", "input"})
