// The view: its elements, what they do, and what is remembered between two drawings.

/** Panels that are kept unpacked. */
const MOST_PANELS = 4;
const HINT = "Point at a cell, or focus the picture and use the arrow keys.";
const HELP = "Arrow keys move by a cell, with Shift or Page Up and Page Down by a block, Home and End to the ends of a row; " +
  "plus and minus zoom, 0 shows everything, Escape leaves the cell.";

/** What was computed for the last few keys. */
class Recent {
  constructor(most) {
    this.most = most;
    this.values = new Map();
  }

  get(key, compute) {
    const value = this.values.has(key) ? this.values.get(key) : compute();
    this.values.delete(key);
    this.values.set(key, value);
    if (this.values.size > this.most) this.values.delete(this.values.keys().next().value);
    return value;
  }
}

class View {
  constructor(element, data) {
    this.data = data;
    this.element = element;
    this.mode = { why: hasTerms(data) && data.start === "why", blocks: Boolean(data.block_size) && data.start === "blocks" };
    this.panels = new Recent(MOST_PANELS);
    this.ended = new AbortController();
    this.index = 0;     // of the panel shown
    this.panel = null;  // that panel, once unpacked
    this.image = null;  // that panel in the mode and the palette of now, once drawn
    this.pinned = null; // the pixel chosen by key or tap
    this.hovered = null;
    this.pointers = new Map();
    this.build();
    this.stage = new Stage(this.canvas, data);
    this.listen();
    this.show(0);
  }

  build() {
    const { data, element } = this;
    element.classList.add("flexmask");
    element.classList.toggle("flexmask-wide", data.kv_len > 3 * data.q_len);
    element.setAttribute("aria-busy", "true");
    const label = `Mask ${brief(data.text)}, ${grouped(data.q_len)} queries down, ${grouped(data.kv_len)} keys across. ${HELP}`;
    this.canvas = made("canvas", { tabindex: "0", role: "application", "aria-roledescription": "mask", "aria-label": label });
    this.readout = made("p", { class: "flexmask-readout", role: "status", "aria-live": "polite" }, HINT);
    this.legend = made("tbody");
    this.facts = made("ul", { class: "flexmask-facts" });
    const head = made("tr", {}, ...["Kind of cell", "Cells", "Share"].map((text) => made("th", { scope: "col" }, text)));
    const side = made("div", { class: "flexmask-side" },
      made("table", { class: "flexmask-legend" }, made("caption", {}, "Legend, with the number of cells of each category"), made("thead", {}, head), this.legend),
      this.facts);
    element.replaceChildren(made("div", { class: "flexmask-body" },
      this.buildTools(),
      made("div", { class: "flexmask-frame" }, made("div", { class: "flexmask-stage" }, this.canvas), this.readout),
      side));
  }

  buildTools() {
    const { data } = this;
    const choosers = made("div", { class: "flexmask-group" });
    for (const [key, name] of [["batch", "Sequence"], ["head", "Head"]]) {
      const values = [...new Set(data.panels.map((panel) => panel[key]))].sort((one, other) => one - other);
      if (values.length < 2) continue;
      const select = made("select", {}, ...values.map((value) => made("option", { value }, String(value))));
      select.addEventListener("change", () => this.choose(key, Number(select.value)));
      this[key] = select;
      choosers.append(made("label", { class: "flexmask-field" }, `${name} `, select));
    }
    const toggles = [];
    if (hasTerms(data)) toggles.push(["why", "Why hidden"]);
    if (data.block_size) toggles.push(["blocks", "Blocks"]);
    for (const [key, name] of toggles) {
      const box = made("input", { type: "checkbox" });
      box.checked = this.mode[key];
      box.addEventListener("change", () => {
        this.mode[key] = box.checked;
        this.refresh();
      });
      choosers.append(made("label", { class: "flexmask-field" }, box, ` ${name}`));
    }
    const button = (text, label, action) => {
      const made_ = made("button", { type: "button", title: label, "aria-label": label }, text);
      made_.addEventListener("click", action);
      return made_;
    };
    const copy = button("Copy text", "Copy the mask’s text", async () => {
      const done = await copied(data.text, copy);
      this.say(done ? "The mask’s text is copied." : "This page may not copy: select the text instead.");
    });
    return made("div", { class: "flexmask-tools" }, choosers,
      made("div", { class: "flexmask-group flexmask-actions" },
        made("div", { class: "flexmask-zoom", role: "group", "aria-label": "Zoom" },
          button("−", "Zoom out", () => this.zoom(1 / 1.5)),
          button("Fit", "Show everything", () => this.fit()),
          button("+", "Zoom in", () => this.zoom(1.5))),
        copy));
  }

  listen() {
    const { canvas } = this, { signal } = this.ended;
    const observer = new ResizeObserver(() => this.resize());
    observer.observe(canvas);
    signal.addEventListener("abort", () => observer.disconnect());
    onThemeChange(() => this.refresh(), signal);
    // Paper is white: what is printed is drawn in the light colors.
    for (const [event, printing] of [["beforeprint", true], ["afterprint", false]]) {
      addEventListener(event, () => {
        this.element.classList.toggle("flexmask-printing", printing);
        this.refresh();
        this.paint();
      }, { signal });
    }
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    canvas.addEventListener("pointerup", (event) => this.release(event, true));
    canvas.addEventListener("pointercancel", (event) => this.release(event, false));
    canvas.addEventListener("pointerleave", (event) => {
      if (event.pointerType === "mouse") this.hover(null);
    });
  }

  /** Ends the view: what it listened to is let go, and its element is as it was before. */
  destroy() {
    this.ended.abort();
    cancelAnimationFrame(this.frame);
    this.element.replaceChildren();
    this.element.classList.remove("flexmask", "flexmask-wide", "flexmask-printing");
    this.element.removeAttribute("aria-busy");
  }

  /** Chooses the panel with a sequence or a head, and keeps the other where there is such a panel. */
  choose(key, value) {
    const other = key === "batch" ? "head" : "batch", { panels } = this.data, current = panels[this.index];
    const exact = panels.findIndex((panel) => panel[key] === value && panel[other] === current[other]);
    this.show(exact >= 0 ? exact : panels.findIndex((panel) => panel[key] === value));
  }

  async show(index) {
    const { data, element } = this;
    this.index = index;
    element.setAttribute("aria-busy", "true");
    for (const key of ["batch", "head"]) if (this[key]) this[key].value = String(data.panels[index][key]);
    try {
      const panel = await this.panels.get(index, () => loadedPanel(data, data.panels[index]));
      if (index !== this.index || this.ended.signal.aborted) return;  // another was chosen meanwhile, or none is shown any more
      this.panel = panel;
    } catch (error) {
      this.say(`The picture cannot be unpacked: ${error.message}`);
      return;
    }
    this.stage.measure(this.panel);
    this.refresh();
    this.tell();
  }

  resize() {
    if (!this.panel || !this.canvas.clientWidth) return;
    this.stage.measure(this.panel);
    this.paint();
  }

  /** Draws again with the colors and the mode as they are now. */
  refresh() {
    if (!this.panel) return;
    this.palette = this.image = null;
    this.fillLegend();
    this.queue();
  }

  /** Draws with the next frame, once. */
  queue() {
    this.frame ??= requestAnimationFrame(() => {
      this.frame = null;
      this.paint();
    });
  }

  paint() {
    if (!this.panel || !this.stage.width) return;
    if (this.stage.ratio !== (window.devicePixelRatio || 1)) this.stage.measure(this.panel);
    this.palette ??= readPalette(this.element);
    const { data, panel, palette, mode } = this;
    this.image ??= { base: panelImage(data, panel, palette, mode), terms: termImages(data, panel, mode) };
    this.stage.paint(panel, this.image, palette, mode, this.hovered ?? this.pinned);
    // Fitted, one finger scrolls the page; two always zoom.
    this.canvas.style.touchAction = this.stage.zoom > 1 ? "none" : "pan-y";
    this.canvas.classList.toggle("flexmask-grab", this.stage.zoom > 1);
    this.element.setAttribute("aria-busy", "false");
  }

  fillLegend() {
    const { data, panel, mode } = this;
    this.palette ??= readPalette(this.element);
    const all = data.q_len * data.kv_len;
    const rows = legendRows(data, panel, mode).map(({ label, cells, category, block }) => {
      const square = made("canvas", { "aria-hidden": "true" });
      const term = mode.why && hasTerms(data) && data.categories[category].role === "hidden" ? termOf(data, category) : null;
      swatch(square, this.palette, cellColor(data, this.palette, mode, category, block), panel.cells ? term : null, window.devicePixelRatio || 1);
      const [least, most] = cells ?? [null, null], exact = least === most;
      const count = least === null ? "" : exact ? grouped(least) : `${grouped(least)} to ${grouped(most)}`;
      const share = least === null ? "" : exact ? percent(least / all) : `${percent(least / all)} to ${percent(most / all)}`;
      return made("tr", {}, made("th", { scope: "row" }, square, made("span", {}, ...breakable(label))), made("td", {}, count), made("td", {}, share));
    });
    this.legend.replaceChildren(...rows);
    this.facts.replaceChildren(...factLines(data, panel, mode, this.stage.toScale).map((line) => made("li", {}, line)));
  }

  /** Says what is under the cursor. */
  tell(live) {
    const cursor = this.hovered ?? this.pinned;
    this.say(cursor && this.panel ? pixelWords(this.data, this.panel, cursor.row, cursor.column) : HINT, live);
  }

  /** Shows a text; screen readers announce it too unless it is not live, as what a mouse passes over. */
  say(text, live = true) {
    this.readout.setAttribute("aria-live", live ? "polite" : "off");
    if (this.readout.textContent !== text) this.readout.textContent = text;
    this.readout.classList.toggle("flexmask-hint", text === HINT);
  }

  hover(cursor) {
    this.hovered = cursor;
    this.tell(false);
    this.queue();
  }

  pin(cursor) {
    this.pinned = cursor;
    this.hovered = null;
    this.tell();
    this.queue();
  }

  zoom(factor, x, y) {
    this.stage.zoomBy(factor, x, y);
    this.queue();
  }

  fit() {
    this.stage.reset();
    this.queue();
  }

  key(event) {
    if (!this.panel || event.ctrlKey || event.metaKey || event.altKey) return;
    const { data } = this, [rows, columns] = data.shape;
    const block = [0, 1].map((axis) => (data.block_size ? Math.max(1, Math.round(data.block_size[axis] / data.step[axis])) : 8));
    const far = event.shiftKey ? block : [1, 1];
    const at = this.hovered ?? this.pinned;
    const to = (down, right) => {
      const clamp = (value, count) => Math.min(count - 1, Math.max(0, value));
      this.pin(at ? { row: clamp(at.row + down, rows), column: clamp(at.column + right, columns) } : { row: 0, column: 0 });
      this.stage.reveal(this.pinned);
    };
    const actions = {
      ArrowUp: () => to(-far[0], 0), ArrowDown: () => to(far[0], 0), ArrowLeft: () => to(0, -far[1]), ArrowRight: () => to(0, far[1]),
      PageUp: () => to(-block[0], 0), PageDown: () => to(block[0], 0), Home: () => to(0, -columns), End: () => to(0, columns),
      "+": () => this.zoomAtCursor(1.5), "=": () => this.zoomAtCursor(1.5), "-": () => this.zoomAtCursor(1 / 1.5), 0: () => this.fit(),
      Escape: () => this.pin(null),
    };
    if (!Object.hasOwn(actions, event.key)) return;
    event.preventDefault();
    actions[event.key]();
  }

  zoomAtCursor(factor) {
    const cursor = this.hovered ?? this.pinned, box = cursor && this.stage.box(cursor.row, cursor.column);
    if (box) this.zoom(factor, (box.left + box.right) / 2, (box.top + box.bottom) / 2);
    else this.zoom(factor);
  }

  wheel(event) {
    const unit = [1, 18, 300][event.deltaMode], factor = Math.exp(-event.deltaY * unit * (event.ctrlKey ? 0.01 : 0.002));
    // Where there is nothing to zoom the page scrolls on.
    if (!this.panel || (factor < 1 && this.stage.zoom <= 1 && !event.ctrlKey)) return;
    event.preventDefault();
    this.zoom(factor, event.offsetX, event.offsetY);
    this.hover(this.stage.pixelAt(event.offsetX, event.offsetY));
  }

  press(event) {
    if (!this.panel || event.button > 0) return;
    this.pointers.set(event.pointerId, { x: event.offsetX, y: event.offsetY, traveled: 0 });
    this.canvas.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.panel) return;
    const held = this.pointers.get(event.pointerId), [x, y] = [event.offsetX, event.offsetY];
    if (held) this.drag(held, x, y);
    if (event.pointerType === "mouse") this.hover(this.stage.pixelAt(x, y));
  }

  /** Moves the mask with one pointer, and zooms with two. */
  drag(held, x, y) {
    const others = [...this.pointers.values()].filter((pointer) => pointer !== held);
    if (others.length) {
      const [other] = others, reach = (to) => Math.hypot(to.x - other.x, to.y - other.y);
      this.zoom(Math.max(10, reach({ x, y })) / Math.max(10, reach(held)), (x + other.x) / 2, (y + other.y) / 2);
      this.stage.pan((x - held.x) / 2, (y - held.y) / 2);
      other.traveled = Infinity;
    } else {
      this.stage.pan(x - held.x, y - held.y);
    }
    held.traveled += Math.hypot(x - held.x, y - held.y);
    [held.x, held.y] = [x, y];
    this.queue();
  }

  /** A press that went nowhere chooses the cell. */
  release(event, complete) {
    const held = this.pointers.get(event.pointerId);
    this.pointers.delete(event.pointerId);
    if (held && complete && held.traveled < 6) this.pin(this.stage.pixelAt(event.offsetX, event.offsetY));
  }
}

/** Mounts an interactive view of a mask into an element; `destroy` takes it away again. */
function flexmaskView(element, data) {
  const view = new View(element, data);
  return { destroy: () => view.destroy() };
}
