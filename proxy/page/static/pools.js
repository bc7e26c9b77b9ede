// The cluster as three panels: encoders, the store, PD workers, with the proxy before them.

import { h, reconcile, setAttr, setText } from "./dom.js";
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
    this.proxy = new Panel("Proxy", "fetch · hash · queue", "proxy");
    this.store = new Panel("Store", "save · load", "store");
    this.encoders = new WorkerPool("Encode", "encoder", encoderLines, open);
    this.pd = new WorkerPool("Prefill · decode", "PD worker", pdLines, open);
    this.node = h("div", { class: "pools" },
      h("div", { class: "side" }, this.proxy.node, this.store.node), this.encoders.node, this.pd.node);
  }

  update(now) {
    const { proxy, store } = now;
    this.proxy.update(proxy.draining ? ["warn", "Draining: it takes no new requests"] : ["good", "Serving"], [
      ["In flight", count(proxy.in_flight), proxy.max_queue ? proxy.in_flight / proxy.max_queue : null],
      ["Queued", `${count(proxy.queued)} of ${count(proxy.max_queue)}`, proxy.max_queue ? proxy.queued / proxy.max_queue : null],
      ["Memory", bytes(proxy.memory_bytes), null],
      ["Proxies", count(now.proxies), null],
    ]);
    const used = store.max_bytes ? store.used_bytes / store.max_bytes : null;
    this.store.update(store.up ? ["good", "Up"] : ["bad", "Down: text goes on, pictures wait. Is the server of --store running?"], [
      ["Embeddings", store.max_bytes ? `${bytes(store.used_bytes)} of ${bytes(store.max_bytes)}` : bytes(store.used_bytes), used],
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
  constructor(title, does, name) {
    this.dot = h("span", { class: "dot" });
    this.state = h("p", { class: "state" });
    this.lines = h("dl", { class: "lines" });
    this.node = h("section", { class: `card panel ${name}`, "aria-label": title },
      h("header", {}, h("h2", {}, this.dot, title), h("span", { class: "soft small" }, does)), this.state, this.lines);
  }

  update([mark, words], lines) {
    setAttr(this.dot, "class", `dot ${mark}`);
    setText(this.state, words);
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

function encoderLines(worker) {
  const ms = worker.encode_ms === null ? "–" : seconds(worker.encode_ms / 1000);
  return { share: worker.jobs ? Math.min(1, worker.work_seconds / 2) : 0, texts: [`${plural(worker.jobs, "job")}`, `${seconds(worker.work_seconds)} of work`, `${ms} each`, `${count(worker.done)} done`] };
}

function pdLines(worker) {
  const waiting = worker.waiting ? `, ${count(worker.waiting)} wait` : "";
  return { share: worker.kv_usage, texts: [`${count(worker.running ?? worker.requests)} running${waiting}`, `KV ${percent(worker.kv_usage)}`, `cache ${percent(worker.cache_usage)}`, `${rate(worker.tokens_per_second)} tok/s`] };
}

/** One pool: how many there are and are wanted, and a row for each worker that opens its details. */
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
    const wanted = scaling?.desired;
    const differs = wanted !== null && wanted !== undefined && wanted !== live;
    setText(this.size, differs ? `${live} live → ${wanted} wanted` : `${live} live`);
    setAttr(this.size, "class", `size${differs ? " differs" : ""}`);
    setText(this.reason, scaling?.reason ?? "");
    this.reason.hidden = !scaling?.reason;
    setText(this.none, `No ${this.word} is registered. Requests wait for one up to their time limit: start it, and look at its log if it is started.`);
    this.none.hidden = workers.length > 0;
    reconcile(this.list, workers.slice(0, 256), (worker) => worker.address, () => this.#row());
  }

  #row() {
    const parts = { dot: h("span", { class: "dot" }), name: h("strong"), state: h("span", { class: "tag" }), texts: h("span", { class: "numbers" }), reason: h("span", { class: "reason" }) };
    const bar = meter();
    let shown = null;
    const button = h("button", { type: "button", class: "worker", onclick: () => this.open(shown) },
      h("span", { class: "head" }, parts.dot, parts.name, parts.state), bar.node, parts.texts, parts.reason);
    return {
      node: h("li", {}, button),
      update: (worker) => {
        shown = worker;
        const { share, texts } = this.lines(worker);
        const fine = worker.state === "serving";
        setAttr(parts.dot, "class", `dot ${grade(worker.state)}`);
        setText(parts.name, worker.name);
        setText(parts.state, stateWord(worker.state));
        setAttr(parts.state, "class", fine ? "offscreen" : `tag ${grade(worker.state)}`);
        setText(parts.texts, texts.join(" · "));
        setText(parts.reason, fine ? "" : worker.reason);
        parts.reason.hidden = fine || !worker.reason;
        bar.set(fine ? share : null);
      },
    };
  }
}

export function upWords(now) {
  return `version ${now.version} · up ${duration(now.uptime)}`;
}
