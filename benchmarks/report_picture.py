"""The pictures of a report that README shows, as Chromium draws them: the verdict in the light, the money in the dark.

    python benchmarks/report_picture.py RUN/evaluation [--folder docs]

RUN/evaluation is the record that `tailguard walkforward` leaves. The browser is driven as the tests drive it.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tailguard.evaluate.record import load_record
from tailguard.evaluate.report import write_report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "evaluate" / "report"))
from browser import NAMES, Browser, find_browser

WIDTH = 1280
# Name, place in the page, height, and whether it is dark.
PICTURES = (("report.png", "#verdict", 880, False), ("report-money.png", "#money", 1120, True))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("record", type=Path, help="folder of a record")
    parser.add_argument("--folder", type=Path, default=Path("docs"), help="where the pictures go")
    options = parser.parse_args()
    path = find_browser()
    if path is None:
        sys.exit(f"none of {', '.join(NAMES)} is on PATH")
    with tempfile.TemporaryDirectory() as folder, Browser(path) as browser:
        page = write_report(load_record(options.record), Path(folder) / "report.html")
        for name, place, height, dark in PICTURES:
            browser.open(page, WIDTH, height, dark=dark)
            browser.evaluate(f"document.querySelector({place!r}).scrollIntoView({{behavior: 'instant'}})")
            browser.evaluate("new Promise(done => setTimeout(() => done(true), 300))")
            browser.screenshot(options.folder / name)
            print(f"{name}: {(options.folder / name).stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
