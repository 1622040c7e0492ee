// The page: the cards and what they are found by, their small drawings, and the mask that is open.
(() => {
"use strict";

const { copied, made, onThemeChange, thumbnail } = flexmaskView;
const byId = (id) => document.getElementById(id);
const entries = JSON.parse(byId("data").textContent);
const cards = new Map([...document.querySelectorAll(".card")].map((card) => [card.dataset.slug, card]));
const places = new Map(entries.map((entry, place) => [entry.slug, place]));
const toggles = [...document.querySelectorAll("[data-tag]")];
const title = document.title;

// What is found.

const joined = (text) => text.toLowerCase().replace(/[^a-z0-9]+/g, "");
const cardsOf = entries.map(({ title, family, caption, text, tags, aliases, source }) => {
  const names = [title, ...aliases, family, ...tags];
  return { names, all: [...names, text, caption, source.map(([words]) => words).join("")].join("\n").toLowerCase(), joined: names.map(joined) };
});
/** The words of the names, and each name as one word, in their order. */
const known = [...new Set(cardsOf.flatMap(({ names, joined }) => [...names.join("\n").toLowerCase().match(/[a-z0-9]+/g), ...joined]))].sort();
/** The entries that are shown, in their order. */
let found = entries;

/** Whether an entry has a word: as it stands, or without signs in one of its names. As in `cli/list.py`. */
function has(card, word) {
  return card.all.includes(word) || (joined(word) !== "" && card.joined.some((name) => name.includes(joined(word))));
}

/** How many signs two words share: those of the longest common part, and of what is before and behind it. */
function shared(a, b) {
  let [most, i, j] = [0, 0, 0];
  for (let k = 0; k < a.length; k++) {
    for (let m = 0; m < b.length; m++) {
      let length = 0;
      while (k + length < a.length && m + length < b.length && a[k + length] === b[m + length]) length++;
      if (length > most) [most, i, j] = [length, k, m];
    }
  }
  return most && most + shared(a.slice(0, i), b.slice(0, j)) + shared(a.slice(i + most), b.slice(j + most));
}

/** The known word nearest to one that no entry has, if one is near: what Python's difflib finds. As in `cli/list.py`. */
function nearest(word) {
  if (cardsOf.some((card) => has(card, word))) return word;
  const ratios = known.map((other) => (2 * shared(other, word)) / (other.length + word.length));
  const best = Math.max(...ratios);
  return best >= 0.75 ? known[ratios.lastIndexOf(best)] : word;
}

function matching(words, tags) {
  const wanted = words.map(nearest);
  return entries.filter((entry, place) => wanted.every((word) => has(cardsOf[place], word)) && tags.every((tag) => entry.tags.includes(tag)));
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

/** Pixels: the height of a drawing at most. */
const HIGHEST = 200;

function draw(card) {
  const box = card.querySelector(".thumb");
  thumbnail(box.firstElementChild, entries[places.get(card.dataset.slug)].view, box.clientWidth, HIGHEST);
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

/** Draws again what has been drawn, when the colors or the sizes are others. */
function redraw() {
  drawn.forEach(draw);
}

// The mask that is open.

const dialog = byId("detail");
/** The entry that is open, its view, and whether the page before it in the history is this one without an entry. */
let open = null, view = null, behind = false;

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
  byId("statistics").replaceChildren(...entry.statistics.map(([label, text]) => made("div", {}, made("dt", {}, label), made("dd", {}, text))));
  byId("tags").replaceChildren(...entry.tags.map((tag) => made("li", {}, tag)));
  byId("source").replaceChildren(...entry.source.map(([text, address]) => (address ? made("a", { href: address, rel: "noreferrer" }, text) : text)));
  byId("aliases").textContent = entry.aliases.join(", ");
  byId("also").hidden = entry.aliases.length === 0;
  byId("said").textContent = "";
  view?.destroy();
  view = flexmaskView(byId("view"), entry.view);
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
  view.destroy();
  view = null;
  if (named()) {
    if (behind) history.back();
    else history.replaceState(null, "", location.href.split("#")[0]);
  }
  behind = false;
  if (!card.hidden) card.querySelector("a").focus();
}

async function copy(button) {
  const code = byId(button.dataset.copies), done = await copied(code.textContent, button);
  if (!done) getSelection().selectAllChildren(code);
  byId("said").textContent = done ? "Copied." : "This page may not copy: the text is selected.";
}

// What happens.

for (const card of cards.values()) {
  card.prepend(made("div", { class: "thumb" }, card.querySelector("canvas")));
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
dialog.addEventListener("keydown", (event) => {
  const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!by || event.ctrlKey || event.metaKey || event.altKey || event.shiftKey) return;
  if (event.target.closest("canvas, select, input, pre")) return;  // where these keys move a cursor
  event.preventDefault();
  step(by);
});
dialog.addEventListener("mousedown", (event) => {
  const { left, right, top, bottom } = dialog.getBoundingClientRect();  // the backdrop has the dialog as its target, as scroll bars have
  if (event.target === dialog && (event.x < left || event.x > right || event.y < top || event.y > bottom)) dialog.close();
});
for (const button of document.querySelectorAll("[data-copies]")) button.addEventListener("click", () => copy(button));

onThemeChange(redraw);
let waiting = null, width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  waiting ??= requestAnimationFrame(() => { waiting = null; redraw(); });
});
filter();
follow();
})();
