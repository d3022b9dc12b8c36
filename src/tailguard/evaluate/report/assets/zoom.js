// Drag across a time axis to look closer; all panels of the figure follow. A button, Escape or a double click leads back.

const SMALLEST_DRAG = 8; // pixels; below, a drag is a click with an unsteady hand

function pixelIn(panel, event) {
  const frame = panel.svg.getBoundingClientRect();
  const at = (event.clientX - frame.left) * (panel.svg.viewBox.baseVal.width / frame.width);
  return Math.min(Math.max(at, panel.box.left), panel.box.right);
}

function enableZoom(panel) {
  let from = null;
  panel.host.addEventListener("pointerdown", (event) => {
    // A finger scrolls the page: it must not be caught.
    if (event.pointerType !== "touch" && event.button === 0) from = pixelIn(panel, event);
  });
  panel.host.addEventListener("pointermove", (event) => {
    if (from !== null && event.buttons === 1) panel.select(from, pixelIn(panel, event));
  });
  panel.host.addEventListener("pointerup", (event) => {
    if (from === null) return;
    const ends = [from, pixelIn(panel, event)].sort((a, b) => a - b);
    from = null;
    if (ends[1] - ends[0] >= SMALLEST_DRAG) panel.figure.zoom(ends.map(panel.x.invert));
  });
  panel.host.addEventListener("dblclick", () => panel.figure.zoom(null));
}

// The places of a mark inside a window, with one neighbour on each side so that lines reach the border.
function inside(mark, part) {
  if (!part) return [0, mark.x.length];
  const first = mark.x.findIndex((x) => x >= part[0]);
  let last = mark.x.length;
  while (last > 0 && mark.x[last - 1] > part[1]) last -= 1;
  return first < 0 ? [0, 0] : [Math.max(first - 1, 0), Math.min(last + 1, mark.x.length)];
}
