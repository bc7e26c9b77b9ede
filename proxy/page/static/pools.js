// The cluster as a row of panels, proxy, encoders, store and PD workers, with arrows between them.

import { h, reconcile, setAttr, setText } from "./dom.js";
import { ARROWS, Arrow } from "./flows.js";
import { bytes, count, duration, percent, plural, rate, seconds } from "./format.js";

const STATES = { serving: "Serving", stalled: "Stalled", lost: "Lost", draining: "Draining", mismatched: "Mismatched" };
const GRADES = { serving: "good", draining: "warn", stalled: "bad", lost: "bad", mismatched: "warn" };

export function stateWord(state) {
  return STATES[state] ?? String(state);
}

export function grade(state) {
  return GRADES[state] ?? "warn";
}

export class Pools {
  constructor(open) {
    this.proxy = new Panel("Proxy", "proxy");
    this.store = new Panel("Store", "store");
    this.encoders = new WorkerPool("Encode", "encoder", encoderLines, open);
    this.pd = new WorkerPool("Prefill · decode", "PD worker", pdLines, open);
    this.arrows = ARROWS.map((one) => new Arrow(one));
    const [requests, jobs, saves, loads, ...direct] = this.arrows.map((arrow) => arrow.node);
    this.node = h("div", { class: "pools" }, requests, this.proxy.node, jobs, this.encoders.node, saves, this.store.node, loads,
      h("div", { class: "direct" }, direct), this.pd.node);
  }

  update(now) {
    const { proxy, store } = now;
    for (const arrow of this.arrows) arrow.update(now);
    this.proxy.update(proxy.draining ? ["warn", "Draining: it takes no new requests"] : ["good", "Serving"], [
      ["In flight", count(proxy.in_flight), proxy.max_queue ? proxy.in_flight / proxy.max_queue : null],
      ["Queued", `${count(proxy.queued)} of ${count(proxy.max_queue)}`, proxy.max_queue ? proxy.queued / proxy.max_queue : null],
      ["Memory", bytes(proxy.memory_bytes), null],
      ["Proxies", count(now.proxies), null],
    ]);
    const used = store.max_bytes ? store.used_bytes / store.max_bytes : null;
    this.store.update(store.up ? ["good", "Up"] : ["bad", "Down: text goes on, pictures wait. Is the server of --store running?"], [
      ["Memory", store.max_bytes ? `${bytes(store.used_bytes)} of ${bytes(store.max_bytes)}` : bytes(store.used_bytes), used],
      ["Evicted", count(store.evictions), null],
    ]);
    this.encoders.update(now.encoders, now.scaling?.encoder);
    this.pd.update(now.pd_workers, now.scaling?.pd);
  }
}

/** A bar from 0 to 1 whose numbers stand beside it. */
export function meter() {
  const bar = h("span", { class: "fill" });
  const node = h("span", { class: "meter", "aria-hidden": "true" }, bar);
  return {
    node,
    set(share) {
      node.hidden = share === null || share === undefined;
      if (node.hidden) return;
      const part = Math.max(0, Math.min(1, share));
      bar.style.width = `${(100 * part).toFixed(1)}%`;
      setAttr(node, "class", `meter${part > 0.9 ? " high" : ""}`);
    },
  };
}

class Panel {
  constructor(title, name) {
    this.dot = h("span", { class: "dot" });
    this.state = h("p", { class: "state" });
    this.lines = h("dl", { class: "lines" });
    this.node = h("section", { class: `card panel ${name}`, "aria-label": title },
      h("header", {}, h("h2", {}, this.dot, title)), this.state, this.lines);
  }

  update([mark, text], lines) {
    setAttr(this.dot, "class", `dot ${mark}`);
    setText(this.state, text);
    setAttr(this.state, "class", `state ${mark === "good" ? "offscreen" : mark}`);
    reconcile(this.lines, lines, ([name]) => name, lineRow);
  }
}

function lineRow([name]) {
  const value = h("dd", {});
  const bar = meter();
  return {
    node: h("div", {}, h("dt", {}, name), value, bar.node),
    update([, text, share]) {
      setText(value, text);
      bar.set(share);
    },
  };
}

/** What a row shows of a worker: `meters` are [name, share], `texts` stand below them. */
function encoderLines(worker) {
  const ms = worker.encode_ms === null ? "–" : seconds(worker.encode_ms / 1000);
  return { meters: measured(worker), texts: [plural(worker.jobs, "job"), `${seconds(worker.work_seconds)} of work`, `${ms} each`, `${count(worker.done)} done`, memory(worker)] };
}

function pdLines(worker) {
  const waiting = worker.waiting ? `, ${count(worker.waiting)} waiting` : "";
  const role = worker.role === "both" ? "" : worker.role;
  const texts = [role, `${count(worker.running ?? worker.requests)} running${waiting}`, `cache ${percent(worker.cache_usage)}`, `${rate(worker.tokens_per_second)} tok/s`, memory(worker)];
  return { meters: [...measured(worker), ["KV", worker.kv_usage]], texts };
}

function measured({ busy, gpu }) {
  return [["Busy", busy], ...(gpu ? [["GPU", gpu.use]] : [])];
}

/** The memory of a worker's GPU, or of its process. */
export function memory({ memory_bytes: own, gpu }) {
  if (gpu) return `${bytes(gpu.memory_bytes)} of ${bytes(gpu.max_memory_bytes)}`;
  return own === null ? "" : bytes(own);
}

/** One pool: how many there are and should be, and a row for each worker that opens its details. */
class WorkerPool {
  constructor(title, word, lines, open) {
    Object.assign(this, { word, lines, open });
    this.size = h("span", { class: "size" });
    this.reason = h("p", { class: "soft small" });
    this.none = h("p", { class: "notice warn" });
    this.list = h("ul", { class: "workers" });
    const name = word === "encoder" ? "encode" : "decode";
    this.node = h("section", { class: `card panel ${name}`, "aria-label": title },
      h("header", {}, h("h2", {}, title), this.size), this.reason, this.none, this.list);
  }

  update(workers, scaling) {
    const live = scaling?.live ?? workers.filter((worker) => worker.state === "serving").length;
    const desired = scaling?.desired;
    const differs = desired !== null && desired !== undefined && desired !== live;
    setText(this.size, differs ? `${live} live → ${desired} desired` : `${live} live`);
    setAttr(this.size, "class", `size${differs ? " differs" : ""}`);
    setText(this.reason, scaling?.reason ?? "");
    this.reason.hidden = !scaling?.reason;
    setText(this.none, `No ${this.word} is registered. Requests wait for one up to their time limit: start it, and look at its log if it is started.`);
    this.none.hidden = workers.length > 0;
    const byName = workers.slice(0, 256).sort((a, b) => a.name.localeCompare(b.name, "en", { numeric: true }));
    reconcile(this.list, byName, (worker) => worker.address, () => this.#row());
  }

  #row() {
    const parts = { dot: h("span", { class: "dot" }), name: h("strong"), state: h("span", { class: "tag" }), meters: h("span", { class: "meters" }), texts: h("span", { class: "numbers" }), reason: h("span", { class: "reason" }) };
    let current = null;
    const button = h("button", { type: "button", class: "worker", onclick: () => this.open(current) },
      h("span", { class: "head" }, parts.dot, parts.name, parts.state), parts.meters, parts.texts, parts.reason);
    return {
      node: h("li", {}, button),
      update: (worker) => {
        current = worker;
        const { meters, texts } = this.lines(worker);
        const fine = worker.state === "serving";
        setAttr(parts.dot, "class", `dot ${grade(worker.state)}`);
        setText(parts.name, worker.name);
        setAttr(button, "title", [worker.address, worker.kind].filter(Boolean).join(" · "));
        setText(parts.state, stateWord(worker.state));
        setAttr(parts.state, "class", fine ? "offscreen" : `tag ${grade(worker.state)}`);
        setText(parts.texts, texts.filter(Boolean).join(" · "));
        setText(parts.reason, fine ? "" : worker.reason);
        parts.reason.hidden = fine || !worker.reason;
        parts.meters.hidden = !fine;
        reconcile(parts.meters, meters, ([name]) => name, meterRow);
      },
    };
  }
}

/** A share with its name and number; a dash without a bar where nothing is reported. */
function meterRow([name]) {
  const value = h("span", { class: "value" });
  const bar = meter();
  return {
    node: h("span", { class: "measure" }, h("span", { class: "soft" }, name), bar.node, value),
    update([, share]) {
      setText(value, percent(share));
      bar.set(share ?? 0);
    },
  };
}

export function upWords(now) {
  return `version ${now.version} · up ${duration(now.uptime)}`;
}
