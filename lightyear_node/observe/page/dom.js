// Creates and updates DOM elements.  Strings are only ever inserted as text: nothing on this page
// parses HTML from a string.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, attributes, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (value === true) element.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, String(value));
  }
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false || child === "") continue;
    element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return element;
}

// Makes `place` contain `children` and changes only what differs, so that focus and scroll positions
// are kept.  Elements with a `data-key` are reused wherever they move.
export function show(place, ...children) {
  const focused = document.activeElement;
  const fresh = filled(document.createElement("div"), {}, children);
  patchChildren(place, fresh);
  if (focused !== document.activeElement && focused.isConnected)
    focused.focus({ preventScroll: true });
}

function patchChildren(old, fresh) {
  const keyed = new Map();
  for (const child of old.children) if (child.dataset.key) keyed.set(child.dataset.key, child);
  let place = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    const key = child.dataset?.key;
    const same = key ? keyed.get(key) : place?.dataset?.key ? null : place;
    if (!same || same.nodeName !== child.nodeName) {
      old.insertBefore(child, place);
      continue;
    }
    if (same === place) place = place.nextSibling;
    else old.insertBefore(same, place);
    patch(same, child);
  }
  while (place) {
    const next = place.nextSibling;
    place.remove();
    place = next;
  }
}

function patch(old, fresh) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  for (const { name } of [...old.attributes])
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes)
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  patchChildren(old, fresh);
}
