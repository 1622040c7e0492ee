// The page: the cards and what they are found by, their small drawings, and the mask that is open.
(() => {
"use strict";

const byId = (id) => document.getElementById(id);
const entries = JSON.parse(byId("data").textContent);
const cards = new Map([...document.querySelectorAll(".card")].map((card) => [card.dataset.slug, card]));
const places = new Map(entries.map((entry, place) => [entry.slug, place]));
const toggles = [...document.querySelectorAll("[data-tag]")];
const title = document.title;

/** An element with a text, or with children. */
function made(name, ...children) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}

// What is found.

const haystacks = entries.map(({ title, family, caption, text, tags, source }) =>
  [title, family, caption, text, ...tags, source.map(([words]) => words).join("")].join("\n").toLowerCase());
/** The entries that are shown, in their order. */
let found = entries;

function matching(words, tags) {
  return entries.filter((entry, place) => words.every((word) => haystacks[place].includes(word)) && tags.every((tag) => entry.tags.includes(tag)));
}

/** Shows what has all words and all tags, and how many would be left with each further tag. */
function filter() {
  const words = byId("query").value.toLowerCase().split(/\s+/).filter(Boolean);
  const tags = toggles.filter((toggle) => toggle.getAttribute("aria-pressed") === "true").map((toggle) => toggle.dataset.tag);
  found = matching(words, tags);
  const shown = new Set(found.map(({ slug }) => slug));
  for (const [slug, card] of cards) card.hidden = !shown.has(slug);
  for (const section of document.querySelectorAll("section")) {
    const left = section.querySelectorAll(".card:not([hidden])").length;
    section.hidden = left === 0;
    section.querySelector("h2 span").textContent = left;
  }
  for (const toggle of toggles) {
    const left = found.filter((entry) => entry.tags.includes(toggle.dataset.tag)).length;
    toggle.querySelector("span").textContent = left;
    toggle.disabled = left === 0 && !tags.includes(toggle.dataset.tag);
  }
  const filtered = words.length + tags.length > 0;
  const masks = (count) => `${count} ${count === 1 ? "mask" : "masks"}`;
  byId("count").textContent = filtered ? `${found.length} of ${masks(entries.length)}` : masks(entries.length);
  byId("clear").hidden = !filtered;
  byId("none").hidden = found.length > 0;
}

function clear() {
  byId("query").value = "";
  for (const toggle of toggles) toggle.setAttribute("aria-pressed", "false");
  filter();
  byId("query").focus();
}

// The small drawings.

/** Pixels: the height of a drawing at most, what is between panels, and the cells from which lines divide them; how much of its
 * colour a term has. */
const HIGHEST = 200, GAP = 8, GRID_FROM = 9, TERM = 0.3;

/** The bytes in a base64 string of zlib data. */
async function unpacked(text) {
  const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** The colours of kinds in the theme in force, as a colour and its opacity on the paper. */
function colours(kinds, element) {
  const probe = element.appendChild(document.createElement("span"));
  const named = (name) => {
    probe.style.color = `var(--flexmask-${name})`;
    return getComputedStyle(probe).color;
  };
  const hidden = kinds.filter(({ role }) => role === "hidden");
  const looks = kinds.map((kind) => {
    if (kind.role === "hidden" && hidden.length > 1) return [named(`term-${hidden.indexOf(kind) % 7}`), TERM];
    return [named(kind.role), 1];
  });
  probe.remove();
  return looks;
}

/** The panels beside and below each other, so that their cells are as large as they can be: columns, and pixels of a cell. */
function arranged(count, down, across, width, height) {
  let best = { columns: 1, size: 0 };
  for (let columns = 1; columns <= count; columns++) {
    const rows = Math.ceil(count / columns);
    const size = Math.min((width - GAP * (columns - 1)) / (columns * across), (height - GAP * (rows - 1)) / (rows * down));
    if (size > best.size) best = { columns, size };
  }
  return best;
}

async function draw(card) {
  const { view } = entries[places.get(card.dataset.slug)], box = card.querySelector(".thumb"), canvas = box.firstElementChild;
  const [down, across] = view.shape, ratio = window.devicePixelRatio || 1;
  const panels = await Promise.all(view.panels.map(({ cells }) => unpacked(cells)));
  const { columns, size } = arranged(panels.length, down, across, box.clientWidth, HIGHEST);
  const cell = Math.max(1, Math.floor(size * ratio)), gap = Math.round(GAP * ratio), line = cell >= GRID_FROM * ratio ? Math.round(ratio) : 0;
  canvas.width = columns * across * cell + (columns - 1) * gap;
  canvas.height = Math.ceil(panels.length / columns) * (down * cell + gap) - gap;
  canvas.style.width = `${canvas.width / ratio}px`;
  canvas.style.height = `${canvas.height / ratio}px`;
  const pen = canvas.getContext("2d"), looks = colours(view.kinds, box);
  panels.forEach((cells, place) => {
    const left = (place % columns) * (across * cell + gap), top = Math.floor(place / columns) * (down * cell + gap);
    cells.forEach((kind, index) => {
      [pen.fillStyle, pen.globalAlpha] = looks[kind];
      pen.fillRect(left + (index % across) * cell, top + Math.floor(index / across) * cell, cell - line, cell - line);
    });
  });
}

const drawn = new Set();
const near = new IntersectionObserver((seen) => {
  for (const { target, isIntersecting } of seen) {
    if (!isIntersecting) continue;
    near.unobserve(target);
    drawn.add(target);
    draw(target);
  }
}, { rootMargin: "300px" });

/** Draws again what has been drawn, when the colours or the sizes are others. */
function redraw() {
  drawn.forEach(draw);
}

// The mask that is open.

const dialog = byId("detail");
const views = new Map();
/** The entry that is open, and whether the page before it in the history is this one without an entry. */
let open = null, behind = false;

const named = () => entries[places.get(location.hash.slice(1))] ?? null;

/** Opens the entry that the address names, or closes what is open. */
function follow() {
  const entry = named();
  if (!entry) {
    if (dialog.open) dialog.close();
    return;
  }
  fill(entry);
  if (!dialog.open) dialog.showModal();
  byId("title").focus({ preventScroll: true });
  dialog.scrollTop = 0;
}

function fill(entry) {
  open = entry;
  document.title = `${entry.title} · ${title}`;
  for (const key of ["family", "title", "caption", "text", "command", "python", "lengths"]) byId(key).textContent = entry[key];
  byId("family").textContent = entry.family[0].toUpperCase() + entry.family.slice(1);
  byId("figures").replaceChildren(...entry.figures.map(([label, text]) => made("div", made("dt", label), made("dd", text))));
  byId("tags").replaceChildren(...entry.tags.map((tag) => made("li", tag)));
  byId("source").replaceChildren(...entry.source.map(([text, address]) => {
    if (!address) return text;
    const link = made("a", text);
    link.href = address;
    link.rel = "noreferrer";
    return link;
  }));
  byId("said").textContent = "";
  for (const [slug, element] of views) element.hidden = slug !== entry.slug;
  if (!views.has(entry.slug)) {
    const element = byId("views").appendChild(document.createElement("div"));
    views.set(entry.slug, element);
    flexmaskView(element, entry.view);
  }
}

/** The entry so many places further, among those that are shown. */
function step(by) {
  const among = found.includes(open) ? found : entries;
  const { slug } = among[(among.indexOf(open) + by + among.length) % among.length];
  location.replace(`#${slug}`);
}

/** What an address without an entry takes back: the card that was open has the focus. */
function closed() {
  const card = cards.get(open.slug);
  document.title = title;
  if (named()) {
    if (behind) history.back();
    else history.replaceState(null, "", location.href.split("#")[0]);
  }
  behind = false;
  if (!card.hidden) card.querySelector("a").focus();
}

async function copy(button) {
  const code = byId(button.dataset.copies);
  let done = true;
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    getSelection().selectAllChildren(code);  // old browsers copy what is selected; else it can be copied by hand
    done = document.execCommand("copy");
  }
  button.textContent = done ? "Copied" : "Selected";
  byId("said").textContent = done ? "Copied." : "The text is selected.";
  setTimeout(() => { button.textContent = "Copy"; }, 1500);
}

// What happens.

for (const card of cards.values()) {
  const box = made("div", card.querySelector("canvas"));
  box.className = "thumb";
  card.prepend(box);
  near.observe(card);
}
document.documentElement.classList.add("live");
if (matchMedia("(max-width: 40rem)").matches) byId("filters").open = false;

byId("query").addEventListener("input", filter);
byId("query").addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !byId("query").value) return;
  event.preventDefault();
  byId("query").value = "";
  filter();
});
for (const toggle of toggles) {
  toggle.addEventListener("click", () => {
    toggle.setAttribute("aria-pressed", String(toggle.getAttribute("aria-pressed") !== "true"));
    filter();
  });
}
byId("clear").addEventListener("click", clear);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || dialog.open || event.ctrlKey || event.metaKey || event.altKey || event.target === byId("query")) return;
  event.preventDefault();
  byId("query").focus();
  byId("query").select();
});

addEventListener("hashchange", (event) => {
  if (named() && !dialog.open && !event.oldURL.split("#")[1]) behind = true;
  follow();
});
byId("previous").addEventListener("click", () => step(-1));
byId("next").addEventListener("click", () => step(1));
byId("close").addEventListener("click", () => dialog.close());
dialog.addEventListener("close", closed);
dialog.addEventListener("mousedown", (event) => {
  const { left, right, top, bottom } = dialog.getBoundingClientRect();  // the backdrop has the dialog as its target, as scroll bars have
  if (event.target === dialog && (event.x < left || event.x > right || event.y < top || event.y > bottom)) dialog.close();
});
for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", () => copy(button));

for (const query of ["(prefers-color-scheme: dark)", "(prefers-contrast: more)", "(forced-colors: active)"]) matchMedia(query).addEventListener("change", redraw);
let waiting = null, width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  waiting ??= requestAnimationFrame(() => { waiting = null; redraw(); });
});
filter();
follow();
})();
