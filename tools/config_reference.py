"""Write docs/config.md, the reference of all settings, from their classes.

python tools/config_reference.py            writes it
python tools/config_reference.py --check    fails when it is not current
"""

import sys
from pathlib import Path

from tailguard.config_help import Section, sections

PAGE = Path(__file__).resolve().parent.parent / "docs" / "config.md"
HEADER = """\
# Configuration reference

All settings of Tailguard, in one tree: one YAML file, `--set section.key=value` on the command line, and the same classes
(`tailguard.config`) for the constructor of `DistributionalPPO`. `tailguard init` writes a file to start from,
`tailguard config` prints the whole tree, `tailguard config --explain training.risk` prints this page in parts.
A mistake ends with one line that names the key, its value and what is legal, before anything is written.

This page is made from the classes by `python tools/config_reference.py`; a test fails when it is not current.
"""


def page() -> str:
    """Return the reference as Markdown."""
    return HEADER + "".join(_markdown(section) for section in sections())


def _markdown(section: Section) -> str:
    level = "##" if "." not in section.key else "###"
    title = f"`{section.key}`" if section.key else "Sections"
    rows = [f"| `{s.key.rsplit('.', 1)[-1]}` | {_cell(s.type)} | {s.default} | {_cell(s.meaning)} |" for s in section.settings]
    return "\n".join(
        [f"\n{level} {title}\n", f"{section.summary}\n", "| key | type | default | meaning |", "|---|---|---|---|", *rows, ""]
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the page, or compare it."""
    if "--check" in arguments:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        if not current:
            sys.stderr.write(f"{PAGE} is not current: run python tools/config_reference.py\n")
        return 0 if current else 1
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
