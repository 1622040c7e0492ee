// The drawing: where cells lie on the canvas, how that moves, and what is painted.

const LABEL_FONT = "11px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
const TITLE_FONT = "11px system-ui, sans-serif";
const BAND = 14;
/** Pixels: a mask's shorter side at least, a drawn pixel at most (when fitted, and at all), and the least distance at which lines are drawn. */
const SHORTEST = 44, LARGEST_FITTED = 64, LARGEST = 120, GRID_FROM = 7, BLOCKS_FROM = 5;
/** Pixels along the axes between two labels' middles, from which they fit. */
const LABEL_PITCH = 13;

class Stage {
  constructor(canvas, data) {
    this.canvas = canvas;
    this.pen = canvas.getContext("2d");
    this.layer = made("canvas");  // for one term at a time
    this.data = data;
    this.width = this.height = 0;
    this.zoom = 1;  // 1 is fitted
  }

  /** Takes the size of the canvas on the page, and a panel, of which the margins depend on bands and labels. */
  measure(panel) {
    const { data, pen } = this;
    this.ratio = window.devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.height = this.canvas.clientHeight;
    this.canvas.width = this.layer.width = Math.round(this.width * this.ratio);
    this.canvas.height = this.layer.height = Math.round(this.height * this.ratio);
    this.patterns = {};
    pen.font = LABEL_FONT;
    const longest = (texts) => Math.ceil(Math.max(...texts.map((text) => pen.measureText(text).width)));
    const most = Math.min(110, Math.min(this.width, this.height) * 0.24);
    const tokens = (list) => (list ? Math.min(most, longest(list.slice(0, 2000).map(readable))) : 0);
    const bands = (axis) => panel.bands.filter((band) => band.axis === axis);
    this.bands = { q: bands("q").length * (BAND + 2), kv: bands("kv").length * (BAND + 2) };
    const labels = (axis) => Math.min(most, longest(["", ...bands(axis).map(bandLabel)])) + 8;
    this.bandLabels = { q: labels("q"), kv: labels("kv") };
    this.numbers = { q: Math.max(14, longest([grouped(panel.q_offset + data.q_len - 1)])), kv: 11 };
    this.tokens = { q: tokens(data.q_tokens), kv: tokens(data.kv_tokens) };
    this.fit();
  }

  /** Sets the place for the cells: what labels, bands and the axes' names leave. Tokens take theirs only where they are shown. */
  setMargins(size) {
    const { data, bands } = this;
    this.named = { q: Boolean(data.q_tokens) && size.q >= LABEL_PITCH, kv: Boolean(data.kv_tokens) && size.kv >= LABEL_PITCH };
    const label = (axis) => Math.max(this.numbers[axis], this.named[axis] ? this.tokens[axis] : 0);
    this.labels = { q: label("q"), kv: label("kv") };
    // The labels of bands are in the corner: those of keys to the left of the cells, those of queries above them.
    const left = Math.max(30 + this.labels.q, this.bandLabels.kv) + bands.q, top = Math.max(30 + this.labels.kv, this.bandLabels.q) + bands.kv;
    this.plot = { left, top, right: Math.max(left + 40, this.width - 14), bottom: Math.max(top + 40, this.height - 14) };
  }

  /** Chooses the scale at which everything is seen, to which the zoom is relative, and keeps the zoom there is. */
  fit() {
    const { q_len: down, kv_len: across, step } = this.data;
    const room = (size) => {
      this.setMargins({ q: size, kv: size });
      const { plot } = this;
      return Math.min((plot.right - plot.left) / across, (plot.bottom - plot.top) / down, LARGEST_FITTED / Math.max(...step));
    };
    let size = room(LARGEST);
    if (size < LABEL_PITCH) size = Math.min(room(0), LABEL_PITCH - 0.01);
    const device = size * this.ratio;
    if (Math.max(...step) === 1 && device >= 4) size = Math.floor(device) / this.ratio;  // squares of whole pixels are alike
    const shorter = Math.min(across, down);
    this.toScale = size * shorter >= Math.min(SHORTEST, LARGEST_FITTED * shorter);
    this.fitted = { kv: size, q: size };
    if (!this.toScale) this.fitted[down < across ? "q" : "kv"] = SHORTEST / shorter;
    const { fitted } = this;
    this.mostZoom = Math.max(1, LARGEST / Math.max(fitted.kv * step[1], fitted.q * step[0]));
    this.zoom = Math.min(this.zoom, this.mostZoom);
    this.place(this.left ?? 0, this.top ?? 0);
  }

  /** Moves the mask's corner, within the limits that keep it on the canvas. */
  place(left, top) {
    const { data, fitted } = this;
    this.size = { q: fitted.q * this.zoom, kv: fitted.kv * this.zoom };
    this.setMargins(this.size);
    const { plot } = this;
    // Fitted, the mask stands in the middle; larger, it leaves at most the gap that it leaves there.
    const within = (at, from, to, fits, length) => {
      const gap = Math.max(0, Math.floor((to - from - fits) / 2));
      return Math.min(from + gap, Math.max(to - gap - length, at));
    };
    this.left = within(left, plot.left, plot.right, data.kv_len * fitted.kv, data.kv_len * this.size.kv);
    this.top = within(top, plot.top, plot.bottom, data.q_len * fitted.q, data.q_len * this.size.q);
  }

  pan(right, down) {
    this.place(this.left + right, this.top + down);
  }

  /** Zooms so that the cell at `x`, `y` stays there; without a place, at the middle. */
  zoomBy(factor, x = (this.plot.left + this.plot.right) / 2, y = (this.plot.top + this.plot.bottom) / 2) {
    const zoom = Math.min(this.mostZoom, Math.max(1, this.zoom * factor)), by = zoom / this.zoom;
    this.zoom = zoom;
    this.place(x - (x - this.left) * by, y - (y - this.top) * by);
  }

  reset() {
    this.zoom = 1;
    this.place(0, 0);
  }

  /** Moves the mask so that a pixel is on the canvas. */
  reveal({ row, column }) {
    const { plot } = this, box = this.box(row, column);
    const push = (from, to, low, high) => (from < low ? low - from : to > high ? high - to : 0);
    this.pan(push(box.left, box.right, plot.left, plot.right), push(box.top, box.bottom, plot.top, plot.bottom));
  }

  /** Where an index of an axis begins on the canvas, on the grid of the device's pixels. */
  at(axis, index) {
    const start = axis === "q" ? this.top : this.left;
    return Math.round((start + index * this.size[axis]) * this.ratio) / this.ratio;
  }

  box(row, column) {
    const { q, kv } = pixelRange(this.data, row, column);
    return { left: this.at("kv", kv[0]), right: this.at("kv", kv[1]), top: this.at("q", q[0]), bottom: this.at("q", q[1]) };
  }

  /** The part of the canvas where cells are seen. */
  window() {
    const { plot, data } = this;
    return {
      left: Math.max(plot.left, this.at("kv", 0)), right: Math.min(plot.right, this.at("kv", data.kv_len)),
      top: Math.max(plot.top, this.at("q", 0)), bottom: Math.min(plot.bottom, this.at("q", data.q_len)),
    };
  }

  /** The pixel at a place on the canvas, or null outside the mask. */
  pixelAt(x, y) {
    const seen = this.window(), { data } = this;
    if (x < seen.left || x >= seen.right || y < seen.top || y >= seen.bottom) return null;
    const along = (place, axis, length, step) => {
      const guess = Math.floor((place - (axis === "q" ? this.top : this.left)) / this.size[axis]);
      const index = Math.min(length - 1, Math.max(0, guess));
      // Edges are drawn on whole device pixels, up to half a pixel off.
      const settled = place < this.at(axis, index) ? index - 1 : place >= this.at(axis, index + 1) ? index + 1 : index;
      return Math.floor(Math.min(length - 1, Math.max(0, settled)) / step);
    };
    return { row: along(y, "q", data.q_len, data.step[0]), column: along(x, "kv", data.kv_len, data.step[1]) };
  }

  paint(panel, image, palette, mode, cursor) {
    const { pen, ratio } = this, seen = this.window();
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.fillStyle = css(palette.paper);
    pen.fillRect(0, 0, this.width, this.height);
    pen.save();
    pen.beginPath();
    pen.rect(seen.left, seen.top, seen.right - seen.left, seen.bottom - seen.top);
    pen.clip();
    this.paintCells(image, palette, seen);
    this.paintLines(palette, mode, seen);
    if (cursor) this.paintGuides(palette, seen, cursor);
    pen.restore();
    pen.strokeStyle = css(palette.faint);
    pen.lineWidth = 1;
    const half = 0.5 / ratio;
    pen.strokeRect(seen.left - half, seen.top - half, seen.right - seen.left + 2 * half, seen.bottom - seen.top + 2 * half);
    this.paintBands(panel, palette, seen);
    this.paintAxis("kv", panel, palette, seen, cursor);
    this.paintAxis("q", panel, palette, seen, cursor);
    if (cursor) this.paintCursor(palette, cursor);
  }

  /** Only the pixels in sight are drawn: at a large zoom the whole would be larger than a canvas can place exactly. */
  paintCells(image, palette, seen) {
    const { pen, data } = this;
    const range = (from, to, axis, step, count) => {
      const start = axis === "q" ? this.top : this.left, size = this.size[axis] * step;
      return [Math.max(0, Math.floor((from - start) / size) - 1), Math.min(count, Math.ceil((to - start) / size) + 1)];
    };
    const [row, lastRow] = range(seen.top, seen.bottom, "q", data.step[0], data.shape[0]);
    const [column, lastColumn] = range(seen.left, seen.right, "kv", data.step[1], data.shape[1]);
    const left = this.at("kv", column * data.step[1]), top = this.at("q", row * data.step[0]);
    const wide = this.at("kv", lastColumn * data.step[1]) - left, high = this.at("q", lastRow * data.step[0]) - top;
    const show = (brush, picture) => {
      brush.imageSmoothingEnabled = wide * this.ratio < lastColumn - column || high * this.ratio < lastRow - row;
      brush.imageSmoothingQuality = "high";
      brush.drawImage(picture, column, row, lastColumn - column, lastRow - row, left, top, wide, high);
    };
    show(pen, image.base);
    const { layer } = this;
    for (const { term, image: mask } of image.terms) {
      const brush = layer.getContext("2d");
      brush.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
      brush.globalCompositeOperation = "source-over";
      brush.clearRect(0, 0, this.width + 1, this.height + 1);
      show(brush, mask);
      brush.setTransform(1, 0, 0, 1, Math.round(this.left * this.ratio), Math.round(this.top * this.ratio));
      brush.globalCompositeOperation = "source-in";
      brush.fillStyle = this.pattern(palette, term);
      brush.fillRect(-this.left * this.ratio, -this.top * this.ratio, layer.width, layer.height);
      pen.drawImage(layer, 0, 0, this.width, this.height);
    }
  }

  /** The pattern of a term, made once for a palette. */
  pattern(palette, term) {
    if (this.patterns.palette !== palette) this.patterns = { palette };
    return this.patterns[term] ??= termPattern(this.pen, palette, term, this.ratio);
  }

  paintLines(palette, mode, seen) {
    const { data } = this, [high, wide] = data.step;
    if (this.size.kv * wide >= GRID_FROM) this.paintEvery("kv", wide, css(palette.paper), 1, seen);
    if (this.size.q * high >= GRID_FROM) this.paintEvery("q", high, css(palette.paper), 1, seen);
    if (!mode.blocks) return;
    for (const [axis, size] of [["q", data.block_size[0]], ["kv", data.block_size[1]]]) {
      const wide = this.size[axis] * size;  // lines that are close together would darken what they divide
      if (wide >= BLOCKS_FROM) this.paintEvery(axis, size, css(mixed(palette.ink, palette.paper, wide > 24 ? 0.8 : 0.45)), 1, seen);
    }
  }

  /** Lines across an axis, at every `step` of its indices. */
  paintEvery(axis, step, color, width, seen) {
    const { pen, ratio } = this, size = this.size[axis] * step;
    const [from, to, start] = axis === "q" ? [seen.top, seen.bottom, this.top] : [seen.left, seen.right, this.left];
    const thick = Math.max(1, Math.round(width * ratio)) / ratio, before = Math.floor(thick * ratio / 2) / ratio;
    pen.fillStyle = color;
    for (let line = Math.max(1, Math.floor((from - start) / size)); start + line * size < to; line++) {
      const place = this.at(axis, line * step) - before;
      if (axis === "q") pen.fillRect(seen.left, place, seen.right - seen.left, thick);
      else pen.fillRect(place, seen.top, thick, seen.bottom - seen.top);
    }
  }

  paintGuides(palette, seen, { row, column }) {
    const { pen } = this, box = this.box(row, column);
    pen.fillStyle = css(palette.ink);
    pen.globalAlpha = 0.13;
    pen.fillRect(seen.left, box.top, Math.max(0, box.left - seen.left), Math.max(1, box.bottom - box.top));
    pen.fillRect(box.left, seen.top, Math.max(1, box.right - box.left), Math.max(0, box.top - seen.top));
    pen.globalAlpha = 1;
  }

  paintCursor(palette, { row, column }) {
    const { pen, plot } = this, box = this.box(row, column), grow = Math.max(0, (7 - (box.right - box.left)) / 2);
    const tall = Math.max(0, (7 - (box.bottom - box.top)) / 2);
    pen.save();
    pen.beginPath();
    pen.rect(plot.left - 4, plot.top - 4, plot.right - plot.left + 8, plot.bottom - plot.top + 8);
    pen.clip();
    for (const [color, width] of [[palette.paper, 4], [palette.ink, 2]]) {
      pen.strokeStyle = css(color);
      pen.lineWidth = width;
      pen.strokeRect(box.left - grow, box.top - tall, box.right - box.left + 2 * grow, box.bottom - box.top + 2 * tall);
    }
    pen.restore();
  }

  paintBands(panel, palette, seen) {
    for (const axis of ["q", "kv"]) {
      panel.bands.filter((band) => band.axis === axis).forEach((band, level) => this.paintBand(band, level, palette, seen));
    }
  }

  /** One band: its stretches as bars along the mask, the innermost first. */
  paintBand(band, level, palette, seen) {
    const { pen, data } = this, down = band.axis === "q";
    const [from, to] = down ? [seen.top, seen.bottom] : [seen.left, seen.right];
    const place = (down ? seen.left : seen.top) - (level + 1) * (BAND + 2) - 1;
    let tint = 0;
    pen.font = LABEL_FONT;
    pen.textBaseline = "middle";
    pen.save();
    pen.translate(down ? place + BAND / 2 : seen.left - this.bands.q - 4, down ? seen.top - this.bands.kv - 4 : place + BAND / 2 + 0.5);
    if (down) pen.rotate(-Math.PI / 2);
    pen.textAlign = down ? "left" : "right";
    pen.fillStyle = css(palette.faint);
    pen.fillText(this.shortened(bandLabel(band), this.bandLabels[band.axis] - 4), 0, 0);
    pen.restore();
    pen.textAlign = "center";
    for (const [start, stop, value] of stretches(data, band, [0, Infinity])) {
      if (value === "") continue;
      const padding = value === "padding", color = padding ? palette["band-padding"] : palette[tint ? "band-b" : "band-a"];
      if (!padding) tint = 1 - tint;
      const low = Math.max(from, this.at(band.axis, start)), high = Math.min(to, this.at(band.axis, stop));
      if (high <= low) continue;
      const length = Math.max(1 / this.ratio, high - low - (high - low > 4 ? 1 : 0));
      pen.fillStyle = css(color);
      if (down) pen.fillRect(place, low, BAND, length);
      else pen.fillRect(low, place, length, BAND);
      const text = this.shortened(readable(value), length - 4);
      if (text.length < Math.min(6, value.length)) continue;
      pen.save();
      pen.translate(down ? place + BAND / 2 : low + length / 2, down ? low + length / 2 : place + BAND / 2 + 0.5);
      if (down) pen.rotate(-Math.PI / 2);
      pen.fillStyle = css(palette.ink);
      pen.fillText(text, 0, 0);
      pen.restore();
    }
  }

  /** A text cut to a width; "" if nothing of it fits. */
  shortened(text, width) {
    if (this.pen.measureText(text).width <= width) return text;
    let length = text.length;
    while (length > 0 && this.pen.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
    return length > 0 ? `${text.slice(0, length)}…` : "";
  }

  /** Numbers or tokens along an axis, its name, and where the cursor stands. */
  paintAxis(axis, panel, palette, seen, cursor) {
    const { pen, data } = this, down = axis === "q";
    const tokens = down ? data.q_tokens : data.kv_tokens, offset = down ? panel.q_offset : 0;
    const [from, to, length] = down ? [seen.top, seen.bottom, data.q_len] : [seen.left, seen.right, data.kv_len];
    const edge = (down ? seen.left : seen.top) - this.bands[axis] - 6;
    const named = this.named[axis];
    pen.font = LABEL_FONT;
    const text = (index) => (named ? readable(tokens[index]) : grouped(index + offset));
    const every = this.labelStep(axis, down || named ? LABEL_PITCH : pen.measureText(grouped(length - 1 + offset)).width + 8);
    const start = down ? this.top : this.left;
    const current = cursor && pixelRange(data, cursor.row, cursor.column)[axis];
    const middle = (index, count = 1) => (this.at(axis, index) + this.at(axis, Math.min(length, index + count))) / 2;
    const own = current && Math.min(to, Math.max(from, middle(current[0], current[1] - current[0])));
    const width = (words) => (down || named ? LABEL_PITCH : pen.measureText(words).width + 8);
    const chip = current ? text(current[0]) : "";
    const phase = this.blockOf(axis) ? 0 : (every - (offset % every)) % every;
    let index = Math.max(0, Math.floor((from - start) / this.size[axis]) - 1);
    index += (((phase - index) % every) + every) % every;
    pen.fillStyle = css(palette.ink);
    for (; index < length; index += every) {
      const place = middle(index);
      if (place < from) continue;
      if (place > to) break;
      if (current && Math.abs(place - own) < (width(text(index)) + width(chip)) / 2) continue;
      if (every > 1) this.paintTick(axis, place, edge, palette);
      this.paintLabel(axis, text(index), place, edge, css(palette.ink), named);
    }
    if (current) this.paintChip(axis, chip, own, edge, palette, named);
    pen.font = TITLE_FONT;
    pen.save();
    pen.translate(down ? edge - this.labels.q - 10 : (from + to) / 2, down ? (from + to) / 2 : edge - this.labels.kv - 10);
    if (down) pen.rotate(-Math.PI / 2);
    pen.textAlign = "center";
    pen.textBaseline = "middle";
    pen.fillStyle = css(palette.faint);
    pen.fillText(down ? "queries" : "keys", 0, 0);
    pen.restore();
  }

  blockOf(axis) {
    return this.data.block_size && this.data.block_size[axis === "q" ? 0 : 1];
  }

  /** At every how many indices there is room for a label: round numbers, or whole blocks where there are blocks. */
  labelStep(axis, room) {
    const block = this.blockOf(axis), fits = (step, apart) => step * this.size[axis] >= apart;
    if (fits(1, room)) return 1;
    const apart = Math.max(room, 26);  // numbers that are left out leave more room to the others
    for (let unit = 1; ; unit *= block ? 16 : 10) {
      for (const step of block ? [1, 2, 4, 8] : [1, 2, 5]) {
        if (fits(unit * step * (block ?? 1), apart)) return unit * step * (block ?? 1);
      }
    }
  }

  paintTick(axis, place, edge, palette) {
    const { pen } = this, thick = 1 / this.ratio;
    pen.save();
    pen.fillStyle = css(palette.faint);
    if (axis === "q") pen.fillRect(edge + 2, place, 4, thick);
    else pen.fillRect(place, edge + 2, thick, 4);
    pen.restore();
  }

  /** A label along the axis: upright above columns if it is a number, on its side if it is a token. */
  paintLabel(axis, text, place, edge, color, named) {
    const { pen } = this, cut = this.shortened(text, this.labels[axis] + (axis === "kv" && !named ? 1000 : 1));
    pen.save();
    pen.fillStyle = color;
    if (axis === "q") {
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      pen.translate(edge, place + 0.5);
    } else if (named) {
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      pen.translate(place, edge);
      pen.rotate(-Math.PI / 2);
    } else {
      pen.textAlign = "center";
      pen.textBaseline = "alphabetic";
      pen.translate(place, edge);
    }
    pen.fillText(cut, 0, 0);
    pen.restore();
  }

  /** The label of the cursor's row or column, reversed out. */
  paintChip(axis, text, place, edge, palette, named) {
    const { pen } = this, cut = this.shortened(text, this.labels[axis] + (axis === "kv" && !named ? 1000 : 1));
    const length = pen.measureText(cut).width;
    pen.fillStyle = css(palette.ink);
    if (axis === "q") pen.fillRect(edge - length - 3, place - 7, length + 6, 14);
    else if (named) pen.fillRect(place - 7, edge - length - 3, 14, length + 6);
    else pen.fillRect(place - length / 2 - 3, edge - 11, length + 6, 14);
    this.paintLabel(axis, text, place, edge, css(palette.paper), named);
  }
}
