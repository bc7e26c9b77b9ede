// Elements from plain values. Text is always set as text: nothing here makes HTML of a string.

const SVG = "http://www.w3.org/2000/svg";

/** An HTML element. `props`: on* are listeners, class and data-* attributes, others properties where they exist. */
export function h(tag, props = {}, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** An SVG element. */
export function svg(tag, props = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [key, to] of Object.entries(value)) node.style.setProperty(key, to);
    else if (name in node && node.namespaceURI !== SVG && !name.includes("-") && name !== "list" && name !== "spellcheck") node[name] = value;
    else node.setAttribute(name === "className" ? "class" : name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Sets a text only where it differs: an untouched node costs no layout. */
export function setText(node, text) {
  const value = String(text);
  if (node.textContent !== value) node.textContent = value;
}

/** Sets an attribute, or removes it where the value is null. */
export function setAttr(node, name, value) {
  if (value === null || value === undefined) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

const rowsOf = new WeakMap();

/**
 * Makes a parent's children those of `items`, in their order. Nodes are kept by key, so focus and hover stay.
 * `make(item)` returns {node, update(item)}.
 */
export function reconcile(parent, items, key, make) {
  if (!rowsOf.has(parent)) rowsOf.set(parent, new Map());
  const known = rowsOf.get(parent);
  const kept = new Set();
  let at = parent.firstChild;
  for (const item of items) {
    const name = key(item);
    if (kept.has(name)) continue;
    kept.add(name);
    if (!known.has(name)) known.set(name, make(item));
    const row = known.get(name);
    row.update(item);
    if (row.node === at) at = at.nextSibling;
    else parent.insertBefore(row.node, at);
  }
  for (const [name, row] of known) {
    if (kept.has(name)) continue;
    row.node.remove();
    known.delete(name);
  }
}

/** A table of requests in a box that scrolls. `heads`: [title, class of its column]. */
export function requestTable(caption, heads, body) {
  return h("div", { class: "scroll-x" }, h("table", { class: "requests" }, h("caption", { class: "offscreen" }, caption),
    h("thead", {}, h("tr", {}, heads.map(([name, extra]) => h("th", { scope: "col", class: extra }, name)))), body));
}

/** Runs the newest of many calls once a frame; a hidden tab has no frames, so a timer is the other way. */
export function oncePerFrame(work) {
  let pending = false;
  return () => {
    if (pending) return;
    pending = true;
    const run = () => {
      pending = false;
      work();
    };
    if (document.hidden) setTimeout(run, 250);
    else requestAnimationFrame(run);
  };
}

/** A button that copies `text()` and says so. */
export function copyButton(text, label = "Copy") {
  const button = h("button", { type: "button", class: "quiet small", onclick: copy }, label);
  async function copy() {
    const done = await copyText(text());
    setText(button, done ? "Copied" : "Copy failed: select the text");
    setTimeout(() => setText(button, label), 1500);
  }
  return button;
}

async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // Plain HTTP on another host has no clipboard API.
    const area = h("textarea", { value: text, class: "offscreen", "aria-hidden": "true" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
