// Making elements. All text enters the page through textContent, so nothing a model writes can become markup.

/** Make `<tag>` with attributes (`class`, ...; false and null are left out), listeners (`onclick`) and children. */
export function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Say `text` to screen readers, once, when they are done with what they are saying. */
export function announce(text) {
  byId("announcer").textContent = text;
}

const formats = [0, 1, 2].map((digits) => new Intl.NumberFormat("en", { maximumFractionDigits: digits }));

/** A number for people: 12,345 or 67.8. */
export function formatNumber(value, digits = 0) {
  return formats[digits].format(value);
}

/** "1 token", "2 tokens". */
export function count(number, noun, plural = `${noun}s`) {
  return `${formatNumber(number)} ${number === 1 ? noun : plural}`;
}
