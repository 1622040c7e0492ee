// What any page needs: elements, and texts that are copied.

/** An element with attributes and children. */
function made(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** Copies a text, says on the button for a while whether that was allowed, and returns it. */
async function copied(text, button) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copiedBySelection(button.parentElement, text);  // frames and old pages may not write to the clipboard
  }
  const label = button.dataset.label ??= button.textContent;
  button.textContent = done ? "Copied" : "Not allowed";
  setTimeout(() => { button.textContent = label; }, 1500);
  return done;
}

/** Copies in the way that needs no permission; returns whether it worked. */
function copiedBySelection(element, text) {
  const area = element.appendChild(made("textarea", { class: "flexmask-unseen", readonly: "" }));
  const before = document.activeElement;
  area.value = text;
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  if (before) before.focus();
  return done;
}
