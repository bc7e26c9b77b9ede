// The arrows between the panels: how many requests and embeddings go which way, now.

import { h, setAttr, setText } from "./dom.js";
import { bytes, rate } from "./format.js";

/** The arrows in the order of the diagram; `read(now)` gives [things per second, bytes per second or null]. */
export const ARROWS = [
  { name: "requests", label: "requests", tip: "From the proxy to the PD workers, per second", read: (now) => [now.rates.requests, null] },
  { name: "jobs", label: "items", tip: "From the proxy to the encoder workers, per second: items that had to be encoded", read: (now) => [now.flows.encoded.items, null] },
  { name: "saves", label: "saved", tip: "Embeddings that encoder workers save in the store, per second", read: (now) => both(now.flows.encoded) },
  { name: "loads", label: "loaded", tip: "Embeddings that PD workers load from the store, per second", read: (now) => both(now.flows.store) },
  { name: "shm", label: "by shared memory", tip: "Embeddings that PD workers read from encoder workers of their machine, per second", read: (now) => both(now.flows.shm) },
  { name: "peer", label: "from encoder to PD", tip: "Embeddings that PD workers read from encoder workers of other machines, per second", read: (now) => both(now.flows.peer) },
];

function both(flow) {
  return [flow.items, flow.bytes];
}

export class Arrow {
  constructor({ name, label, tip, read }) {
    this.read = read;
    this.rate = h("strong");
    this.bytes = h("span", { class: "soft" });
    this.node = h("div", { class: `flow flow-${name}`, title: tip, role: "img" },
      h("span", { class: "flow-text" }, this.rate, h("span", { class: "soft" }, ` ${label}`)), h("span", { class: "shaft" }), this.bytes);
    this.tip = tip;
  }

  update(now) {
    const [things, size] = this.read(now);
    setText(this.rate, `${rate(things)}/s`);
    setText(this.bytes, size > 0 ? `${bytes(size)}/s` : "");
    setAttr(this.node, "data-flows", things > 0 ? "yes" : null);
    setAttr(this.node, "aria-label", `${this.tip}: ${rate(things)}${size > 0 ? `, ${bytes(size)}` : ""}`);
  }
}
