// A mask as a small drawing of all its panels, without what can be asked of it, and what else a page of many masks needs.

/** Pixels: what is between panels, and the cells from which lines divide them. */
const GAP = 8, LINES_FROM = 9;

/** Panels in a grid whose cells are as large as possible: columns, and pixels of a cell. */
function arranged(count, [down, across], width, height) {
  let best = { columns: 1, size: 0 };
  for (let columns = 1; columns <= count; columns++) {
    const rows = Math.ceil(count / columns);
    const size = Math.min((width - GAP * (columns - 1)) / (columns * across), (height - GAP * (rows - 1)) / (rows * down));
    if (size > best.size) best = { columns, size };
  }
  return best;
}

/** Draws a mask on a canvas on the page, as large as it can be in so many pixels. */
async function thumbnail(canvas, data, width, height) {
  const panels = await Promise.all(data.panels.map((panel) => loadedPanel(data, panel)));
  const [down, across] = data.shape, ratio = window.devicePixelRatio || 1;
  const { columns, size } = arranged(panels.length, data.shape, width, height);
  const cell = Math.max(1, Math.floor(size * ratio)), gap = Math.round(GAP * ratio), line = cell >= LINES_FROM * ratio ? Math.round(ratio) : 0;
  canvas.width = columns * across * cell + (columns - 1) * gap;
  canvas.height = Math.ceil(panels.length / columns) * (down * cell + gap) - gap;
  canvas.style.width = `${canvas.width / ratio}px`;
  canvas.style.height = `${canvas.height / ratio}px`;
  const pen = canvas.getContext("2d"), palette = readPalette(canvas.parentElement), mode = { why: true, blocks: false };
  pen.imageSmoothingEnabled = false;
  panels.forEach((panel, place) => {
    const left = (place % columns) * (across * cell + gap), top = Math.floor(place / columns) * (down * cell + gap);
    pen.drawImage(panelImage(data, panel, palette, mode), left, top, across * cell, down * cell);
    for (let column = 1; column <= across; column++) pen.clearRect(left + column * cell - line, top, line, down * cell);
    for (let row = 1; row <= down; row++) pen.clearRect(left, top + row * cell - line, across * cell, line);
  });
}

Object.assign(flexmaskView, { copied, made, onThemeChange, thumbnail });
