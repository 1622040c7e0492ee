// How it looks: colors from the style sheet, patterns, and panels as images of one pixel a cell.

const TERMS = 6;
/** How much of a term's own color its cells have, and how much its pattern. */
const TINT = 0.3, MARKS = 0.75;
const COLOR_NAMES = [
  "visible", "in-partial", "wasted", "hidden", "unknown", "both", "only-a", "only-b", "neither",
  "band-a", "band-b", "band-padding", ...Array.from({ length: TERMS }, (_, term) => `term-${term}`),
];

const mixed = (one, other, part) => one.map((value, channel) => Math.round(value * part + other[channel] * (1 - part)));
const css = ([red, green, blue]) => `rgb(${red}, ${green}, ${blue})`;

/** The colors of the theme in force, read from the style sheet so that a page may set others. */
function readPalette(element) {
  const pen = made("canvas").getContext("2d", { willReadFrequently: true });
  const channels = (text) => {
    pen.clearRect(0, 0, 1, 1);
    pen.fillStyle = text;
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  const probe = element.appendChild(made("span")), style = getComputedStyle(probe), palette = {};
  const read = (name) => {
    probe.style.color = `var(--flexmask-${name})`;
    return channels(style.color);
  };
  palette.ink = read("ink");
  probe.style.backgroundColor = "var(--flexmask-paper)";
  palette.paper = channels(style.backgroundColor);
  palette.faint = mixed(palette.ink, palette.paper, 0.7);
  // With forced colors the system sets text and paper; categories keep our colors.
  probe.style.forcedColorAdjust = "none";
  for (const name of COLOR_NAMES) palette[name] = read(name);
  probe.remove();
  return palette;
}

/** Calls back when the colors may have become others, until the signal. */
function onThemeChange(changed, signal) {
  for (const query of ["(prefers-color-scheme: dark)", "(forced-colors: active)", "(prefers-contrast: more)"]) {
    matchMedia(query).addEventListener("change", changed, { signal });
  }
}

/** Which of the terms' colors and patterns a category has: the first category that hides has the first. */
const termOf = (data, category) => data.categories.slice(0, category).filter((other) => other.role === "hidden").length % TERMS;

const hasTerms = (data) => data.categories.filter((category) => category.role === "hidden").length > 1;

/** The color of a cell of a category in a block of a state (null: none), as red, green and blue. */
function cellColor(data, palette, mode, category, block) {
  const { role } = data.categories[category];
  if (role === "visible") {
    if (block === UNKNOWN) return palette.unknown;
    return mode.blocks && block !== null && block !== FULL ? palette["in-partial"] : palette.visible;
  }
  if (role !== "hidden") return palette[role.replace("_", "-")];
  if (mode.why && hasTerms(data)) return mixed(palette[`term-${termOf(data, category)}`], palette.paper, TINT);
  if (mode.blocks && block === PARTIAL) return palette.wasted;
  return mode.blocks && block === UNKNOWN ? palette.unknown : palette.hidden;
}

/** The colors of every category of cell in every state of block; the last column is for cells in no block. */
const colorTable = (data, palette, mode) =>
  data.categories.map((_, category) => [EMPTY, PARTIAL, FULL, UNKNOWN, null].map((block) => cellColor(data, palette, mode, category, block)));

/** The state of block that each pixel lies in: partial where it lies in several that differ; 4 where there are none. */
function pixelBlocks(data, panel) {
  const [rows, columns] = data.shape, found = new Uint8Array(rows * columns).fill(4);
  if (!panel.blocks) return found;
  const across = Array.from({ length: columns }, (_, column) => blockRange(data, pixelRange(data, 0, column)).kv);
  for (let row = 0; row < rows; row++) {
    const q = blockRange(data, pixelRange(data, row, 0)).q;
    for (let column = 0; column < columns; column++) {
      const kv = across[column];
      let state = panel.blocks[q[0] * panel.grid.columns + kv[0]];
      if (q[1] - q[0] > 1 || kv[1] - kv[0] > 1) {
        const counts = blockCounts(panel, { q, kv });
        if (counts.filter((count) => count > 0).length > 1) state = PARTIAL;
      }
      found[row * columns + column] = state;
    }
  }
  return found;
}

/** A panel as an image of one pixel a cell. */
function panelImage(data, panel, palette, mode) {
  const [rows, columns] = data.shape;
  const blocks = mode.blocks ? pixelBlocks(data, panel) : new Uint8Array(rows * columns).fill(4);
  const table = colorTable(data, palette, mode);
  const colors = panel.cells ? (index) => table[panel.cells[index]][blocks[index]] : blender(data, panel.shares, table, blocks);
  return painted(rows, columns, colors);
}

/** Where the pattern of each term goes: images of one pixel a cell, transparent elsewhere. */
function termImages(data, panel, mode) {
  if (!mode.why || !panel.cells || !hasTerms(data)) return [];
  const [rows, columns] = data.shape, opaque = [0, 0, 0];
  return data.categories.flatMap((category, which) => (category.role !== "hidden" ? [] : [{
    term: termOf(data, which),
    image: painted(rows, columns, (index) => (panel.cells[index] === which ? opaque : null)),
  }]));
}

/** The colors of pixels that stand for several cells. What matters is never too faint to be seen, be it ever so rare. */
function blender(data, shares, table, blocks) {
  const size = data.shape[0] * data.shape[1];
  const matters = data.categories.map(({ role }) => role === "visible" || role.startsWith("only"));
  const weights = new Float64Array(data.categories.length), color = [0, 0, 0];
  return (index) => {
    let above = 0, below = 0;
    for (let category = 0; category < weights.length; category++) {
      const share = shares[category * size + index] / 255;
      weights[category] = matters[category] && share > 0 ? 0.3 + 0.7 * share : share;
      if (matters[category]) above += weights[category];
      else below += share;
    }
    const most = below > 0 ? Math.min(above, 0.95) : 1;
    color[0] = color[1] = color[2] = 0;
    for (let category = 0; category < weights.length; category++) {
      if (weights[category] === 0) continue;
      const weight = weights[category] * (matters[category] ? most / above : (1 - (above > 0 ? most : 0)) / below);
      const own = table[category][blocks[index]];
      for (let channel = 0; channel < 3; channel++) color[channel] += own[channel] * weight;
    }
    return color;
  };
}

/** A canvas of one pixel for each index, transparent where `colors` gives null. */
function painted(rows, columns, colors) {
  const canvas = made("canvas", { width: columns, height: rows });
  const pen = canvas.getContext("2d"), image = pen.createImageData(columns, rows);
  for (let index = 0; index < rows * columns; index++) {
    const color = colors(index);
    if (color) {
      image.data[4 * index] = color[0];
      image.data[4 * index + 1] = color[1];
      image.data[4 * index + 2] = color[2];
      image.data[4 * index + 3] = 255;
    }
  }
  pen.putImageData(image, 0, 0);
  return canvas;
}

/** The pattern of a term, as a repeating tile: it distinguishes terms where colors cannot. */
function termPattern(pen, palette, term, ratio) {
  const side = Math.max(4, Math.round(7 * ratio)), tile = made("canvas", { width: side, height: side });
  const brush = tile.getContext("2d"), half = side / 2;
  brush.strokeStyle = brush.fillStyle = css(mixed(mixed(palette[`term-${term}`], palette.ink, 0.85), palette.paper, MARKS));
  brush.lineWidth = Math.max(1, ratio * 0.8);
  const line = (...points) => {
    brush.beginPath();
    for (let i = 0; i < points.length; i += 4) {
      brush.moveTo(points[i], points[i + 1]);
      brush.lineTo(points[i + 2], points[i + 3]);
    }
    brush.stroke();
  };
  // Diagonals run past the corners, so that the tiles join.
  const rising = [-half, half, half, -half, -half, side + half, side + half, -half, half, side + half, side + half, half];
  const falling = rising.map((value, i) => (i % 2 ? value : side - value));
  const dot = (x, y, radius) => { brush.beginPath(); brush.arc(x, y, radius, 0, 7); brush.fill(); };
  [
    () => {},  // the first is plain
    () => line(...rising),
    () => dot(half, half, side / 6),
    () => line(...falling),
    () => line(Math.floor(half) + 0.5, 0, Math.floor(half) + 0.5, side),
    () => line(...rising, ...falling),
  ][term]();
  return pen.createPattern(tile, "repeat");
}

/** A square of the legend: the color, and the pattern if there is one. */
function swatch(canvas, palette, color, term, ratio) {
  const side = 18;
  canvas.width = canvas.height = Math.round(side * ratio);
  const pen = canvas.getContext("2d");
  pen.fillStyle = css(color);
  pen.fillRect(0, 0, canvas.width, canvas.height);
  if (term !== null) {
    pen.fillStyle = termPattern(pen, palette, term, ratio);
    pen.fillRect(0, 0, canvas.width, canvas.height);
  }
}
