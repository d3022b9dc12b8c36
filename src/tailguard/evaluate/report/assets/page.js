// The page itself: figures, tabs, downloads, print.

const REPORT = JSON.parse(document.getElementById("report-data").textContent);
const FIGURES = new Map();

function download(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

function startFigures() {
  for (const host of document.querySelectorAll("[data-figure]")) {
    const spec = REPORT.figures[host.dataset.figure];
    const figure = new Figure(host, spec);
    FIGURES.set(host.dataset.figure, figure);
    figure.fit();
  }
}

// Tabs after the WAI-ARIA pattern: arrow keys move, one tab stop for the whole list.
function startTabs() {
  for (const list of document.querySelectorAll('[role="tablist"]')) {
    const tabs = [...list.querySelectorAll('[role="tab"]')];
    const show = (chosen, focus) => {
      for (const tab of tabs) {
        const on = tab === chosen;
        tab.setAttribute("aria-selected", String(on));
        tab.tabIndex = on ? 0 : -1;
        document.getElementById(tab.getAttribute("aria-controls")).classList.toggle("away", !on);
      }
      if (focus) chosen.focus();
    };
    tabs.forEach((tab, i) => {
      tab.addEventListener("click", () => show(tab));
      tab.addEventListener("keydown", (event) => {
        const goal = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
        if (goal === undefined) return;
        event.preventDefault();
        show(tabs[(goal + tabs.length) % tabs.length], true);
      });
    });
    show(tabs[0]);
  }
}

function startDownloads() {
  for (const button of document.querySelectorAll("[data-download]")) {
    const { name, type, text } = REPORT.files[button.dataset.download];
    button.addEventListener("click", () => download(name, text, type));
  }
  for (const button of document.querySelectorAll("[data-csv]")) {
    const id = button.dataset.csv;
    button.addEventListener("click", () => download(`${id}.csv`, FIGURES.get(id).csv(), "text/csv"));
  }
}

// On paper every tab is open and every figure is as wide as the page.
function startPrint() {
  const PAPER = 690;
  window.addEventListener("beforeprint", () => {
    tallness = 0.74;
    for (const figure of FIGURES.values()) figure.draw(figure.spec.columns > 1 ? PAPER / 2 - 16 : PAPER);
  });
  window.addEventListener("afterprint", () => {
    tallness = 1;
    for (const figure of FIGURES.values()) {
      figure.width = 0;
      figure.fit();
    }
  });
}

// A tap or click beside a chart puts its cursor away.
function startClearing() {
  document.addEventListener("pointerdown", (event) => {
    for (const figure of FIGURES.values()) if (!figure.host.contains(event.target)) figure.clear();
  });
}

// The section in view is marked in the contents.
function startContents() {
  const links = new Map([...document.querySelectorAll("nav a[href^='#']")].map((link) => [link.hash.slice(1), link]));
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        for (const link of links.values()) link.removeAttribute("aria-current");
        links.get(entry.target.id).setAttribute("aria-current", "true");
      }
    },
    { rootMargin: "-20% 0px -70% 0px" },
  );
  for (const id of links.keys()) seen.observe(document.getElementById(id));
}

startTabs();
startFigures();
startDownloads();
startPrint();
startContents();
startClearing();
document.documentElement.classList.add("ready");
