// The record of one request: fetched until it has ended, drawn as a waterfall in a dialog.

import { call } from "./api.js";
import { h } from "./dom.js";
import { waterfall } from "./waterfall.js";

const POLL_MS = 500;

/** What this page has asked, by the id of the request. The server keeps no prompt: no other page can show it. */
const asked = new Map();
const MAX_ASKED = 64;

export function noteAsked(id, text) {
  asked.delete(id);
  asked.set(id, text);
  if (asked.size > MAX_ASKED) asked.delete(asked.keys().next().value);
}

/** The record, or an Error that says why there is none. */
export async function fetchRecord(id) {
  try {
    return await (await call(`cluster/requests/${encodeURIComponent(id)}`)).json();
  } catch (error) {
    if (error.status === 404) return new Error("The server has no record of this request: the newest ones are kept for a while, for the key that sent them.");
    return error;
  }
}

export class RecordDialog {
  constructor() {
    this.node = document.getElementById("record-dialog");
    this.body = h("div");
    this.title = h("h2", { id: "record-title" });
    this.save = h("a", { class: "quiet", hidden: true }, "Save as JSON");
    this.node.replaceChildren(
      h("div", { class: "row" }, this.title, h("span", { class: "grow" }), this.save, h("button", { type: "button", class: "quiet", onclick: () => this.node.close() }, "Close")),
      this.body);
    this.node.addEventListener("close", () => this.#offer((this.id = null)));
    this.node.addEventListener("click", (event) => event.target === this.node && this.node.close());
  }

  async open(id) {
    this.id = id;
    this.title.textContent = `Request ${id}`;
    this.#offer(null);
    this.body.replaceChildren(h("p", { class: "soft" }, "Loading …"));
    this.node.showModal();
    while (this.id === id) {
      const record = await fetchRecord(id);
      if (this.id !== id) return;
      if (record instanceof Error) return this.body.replaceChildren(h("p", { class: "notice bad" }, record.message));
      this.body.replaceChildren(about(record), waterfall(record));
      if (record.seconds !== null) return this.#offer(record);
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }

  /** Offers the record of a request that has ended as a file; none with `null`. */
  #offer(record) {
    if (this.save.href) URL.revokeObjectURL(this.save.href);
    this.save.hidden = record === null;
    if (record === null) return this.save.removeAttribute("href");
    this.save.href = URL.createObjectURL(new Blob([JSON.stringify(record, null, 1)], { type: "application/json" }));
    this.save.download = `request-${this.id}.json`;
  }
}

function about({ id, model, status, choices, attempts }) {
  const facts = [model, status === null ? "in flight" : `status ${status}`];
  if (choices > 1) facts.push(`${choices} answers`);
  if (attempts > 1) facts.push(`${attempts} attempts`);
  const line = h("p", { class: "soft small" }, facts.filter(Boolean).join(" · "));
  return asked.has(id) ? h("div", {}, line, h("p", { class: "asked" }, h("span", { class: "soft" }, "Asked on this page: "), asked.get(id))) : line;
}
