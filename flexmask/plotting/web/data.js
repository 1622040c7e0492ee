// What the data says: panels unpacked when they are first shown, and cells put into words.

const BLOCK_WORDS = ["empty", "partial", "full", "of unknown kind"];
const EMPTY = 0, PARTIAL = 1, FULL = 2, UNKNOWN = 3;

/** The values in a base64 string of zlib data; numbers of several bytes are little-endian, as on every machine with a browser. */
async function unpacked(text, Values = Uint8Array) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Values(await new Response(stream).arrayBuffer());
}

/** One sequence and one head, ready to be asked about its cells. */
async function loadedPanel(data, panel) {
  const read = (text, Values) => (text === null ? null : unpacked(text, Values));
  const [cells, hiddenBy, shares, estimated, blocks] = await Promise.all([
    read(panel.cells), read(panel.hidden_by, Uint32Array), read(panel.shares), read(panel.estimated), read(panel.blocks),
  ]);
  return { ...panel, cells, hiddenBy, shares, estimated, blocks, grid: data.block_size && blockGrid(data, blocks) };
}

/** The block grid: how many blocks along each axis, how many of each state, and how many cells these hold. */
function blockGrid(data, blocks) {
  const [high, wide] = data.block_size;
  const rows = Math.ceil(data.q_len / high), columns = Math.ceil(data.kv_len / wide);
  const counts = [0, 0, 0, 0], cells = [0, 0, 0, 0];
  for (let index = 0; blocks && index < blocks.length; index++) {
    const top = Math.floor(index / columns) * high, left = (index % columns) * wide;
    counts[blocks[index]] += 1;
    cells[blocks[index]] += Math.min(high, data.q_len - top) * Math.min(wide, data.kv_len - left);
  }
  return { rows, columns, counts, cells };
}

/** The queries and keys that the pixel at `row`, `column` stands for, as half-open ranges of indices. */
function pixelRange(data, row, column) {
  const [high, wide] = data.step;
  return {
    q: [row * high, Math.min((row + 1) * high, data.q_len)],
    kv: [column * wide, Math.min((column + 1) * wide, data.kv_len)],
  };
}

/** The blocks that a range of cells touches, as half-open ranges of block indices. */
function blockRange(data, range) {
  const along = ([start, stop], size) => [Math.floor(start / size), Math.floor((stop - 1) / size) + 1];
  return { q: along(range.q, data.block_size[0]), kv: along(range.kv, data.block_size[1]) };
}

/** How many blocks of each state a range of blocks holds. */
function blockCounts(panel, range) {
  const counts = [0, 0, 0, 0];
  for (let row = range.q[0]; row < range.q[1]; row++) {
    for (let column = range.kv[0]; column < range.kv[1]; column++) counts[panel.blocks[row * panel.grid.columns + column]] += 1;
  }
  return counts;
}

const grouped = (number) => String(number).replace(/\B(?=(\d{3})+$)/g, ",");

/** A share of 0 to 1 as a percentage that never rounds something to nothing, or to all. */
function percent(share, digits = 1) {
  const unit = 10 ** -digits;
  if (share > 0 && share * 100 < unit) return `under ${unit} %`;
  if (share < 1 && share * 100 > 100 - unit) return `over ${100 - unit} %`;
  return `${(share * 100).toFixed(share === 0 || share === 1 ? 0 : digits)} %`;
}

/** A label short enough for a line: of a call only the name, of anything else the beginning. */
function brief(label) {
  if (label.length <= 60) return label;
  const call = /^((?:hidden by )?~?[\w.]+)\(.*\)$/s.exec(label);
  return call ? `${call[1]}(…)` : `${label.slice(0, 59)}…`;
}

/** A token with what cannot be seen written out. */
function readable(token) {
  const names = { "\n": "\\n", "\t": "\\t", "\r": "\\r" };
  // eslint-disable-next-line no-control-regex
  return token.replace(/[\u0000-\u001f\u007f\u2028\u2029]/g, (c) => names[c] || `\\x${c.charCodeAt(0).toString(16).padStart(2, "0")}`);
}

/** What is written next to a band; padding says so itself. */
const bandLabel = (band) => (band.label === "padding" ? "" : readable(band.label));

/** The stretches of a band that a range along its axis touches, as `[start, stop, value]`. */
function stretches(data, band, [from, to]) {
  const length = band.axis === "q" ? data.q_len : data.kv_len;
  return band.starts
    .map((start, index) => [start, index + 1 < band.starts.length ? band.starts[index + 1] : length, band.values[index]])
    .filter(([start, stop]) => start < to && stop > from);
}

/** The line that says all about one pixel. */
function pixelWords(data, panel, row, column) {
  const range = pixelRange(data, row, column);
  const place = (name, [start, stop], offset, tokens) => {
    if (stop - start > 1) return `${name} ${start + offset}..${stop - 1 + offset}`;
    return `${name} ${start + offset}${tokens ? ` (${readable(tokens[start])})` : ""}`;
  };
  const where = [
    `b ${panel.batch}`,
    `h ${panel.head}`,
    place("q", range.q, panel.q_offset, data.q_tokens),
    place("kv", range.kv, 0, data.kv_tokens),
  ].join("  ");
  const said = [panel.cells ? cellWords(data, panel, row, column) : shareWords(data, panel, row, column)];
  if (data.block_size) said.push(blockWords(data, panel, range));
  for (const [axis, name] of [["q", "query"], ["kv", "key"]]) {
    const words = bandWords(data, panel, axis, range[axis]);
    if (words) said.push(`${name} in ${words}`);
  }
  return `${where}: ${said.filter(Boolean).join("; ")}`;
}

function cellWords(data, panel, row, column) {
  const index = row * data.shape[1] + column, category = panel.cells[index];
  const others = panel.hiddenBy
    ? data.categories.filter((other, bit) => bit !== category && other.role === "hidden" && (panel.hiddenBy[index] >>> bit) & 1)
    : [];
  const also = others.length ? `, also ${others.map((other) => brief(other.label).replace(/^hidden /, "")).join(" and ")}` : "";
  return brief(data.categories[category].label) + also;
}

function shareWords(data, panel, row, column) {
  const index = row * data.shape[1] + column, size = data.shape[0] * data.shape[1];
  const about = panel.estimated && panel.estimated[index] ? "about " : "";
  const range = pixelRange(data, row, column);
  const single = range.q[1] - range.q[0] === 1 && range.kv[1] - range.kv[0] === 1;
  const parts = data.categories.map((category, which) => [category, panel.shares[which * size + index]]).filter(([, share]) => share > 0);
  if (parts.length === 1 && parts[0][1] === 255) return `${single ? "" : `${about}all `}${brief(parts[0][0].label)}`;
  return about + parts.map(([category, share]) => `${percent(share / 255, 0)} ${brief(category.label)}`).join(", ");
}

function blockWords(data, panel, range) {
  if (!panel.blocks) return "";
  const blocks = blockRange(data, range), counts = blockCounts(panel, blocks);
  const places = [blocks.q, blocks.kv].map(([start, stop]) => (stop - start > 1 ? `${start}..${stop - 1}` : `${start}`));
  const total = counts.reduce((sum, count) => sum + count, 0);
  if (total === 1) return `block (${places.join(", ")}) ${BLOCK_WORDS[counts.indexOf(1)]}`;
  return `blocks (${places.join(", ")}): ${countWords(counts)}`;
}

const countWords = (counts) => [FULL, PARTIAL, EMPTY, UNKNOWN]
  .filter((state) => counts[state] > 0).map((state) => `${grouped(counts[state])} ${BLOCK_WORDS[state]}`).join(", ");

function bandWords(data, panel, axis, range) {
  const words = panel.bands.filter((band) => band.axis === axis).map((band) => {
    const values = stretches(data, band, range).map(([, , value]) => value).filter((value) => value !== "");
    if (!values.length) return "";
    const shown = values.length > 4 ? [...values.slice(0, 2), "…", values[values.length - 1]] : values;
    return values.every((value) => value === "padding") ? "padding" : `${band.label} ${shown.join(", ")}`;
  });
  return words.filter(Boolean).join(", ");
}
