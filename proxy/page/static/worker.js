// The details of one worker, in a dialog that goes on with the live data.

import { ChartGroup, TimeChart } from "./chart.js";
import { h, setAttr, setText } from "./dom.js";
import { count, percent, rate, seconds } from "./format.js";
import { grade, memory, stateWord } from "./pools.js";

/** Seconds of a worker's values that the page keeps, and workers that it keeps them for. */
const KEPT = 300;
const MAX_WORKERS = 256;

/** The last minutes of each worker, from the snapshots that this page has seen. */
export class WorkerHistory {
  constructor() {
    this.byAddress = new Map();
  }

  add(now) {
    const live = [...now.encoders, ...now.pd_workers].slice(0, MAX_WORKERS);
    for (const worker of live) {
      const values = this.byAddress.get(worker.address) ?? empty();
      const isEncoder = "jobs" in worker;
      push(values.busy, worker.busy);
      push(values.load, isEncoder ? worker.jobs : worker.requests);
      push(values.speed, isEncoder ? worker.encode_ms : worker.tokens_per_second);
      push(values.share, isEncoder ? worker.work_seconds : worker.kv_usage);
      this.byAddress.set(worker.address, values);
    }
    if (this.byAddress.size > 2 * MAX_WORKERS) {
      const addresses = new Set(live.map((worker) => worker.address));
      for (const address of this.byAddress.keys()) if (!addresses.has(address)) this.byAddress.delete(address);
    }
  }

  of(address) {
    const kept = this.byAddress.get(address) ?? empty();
    return Object.fromEntries(Object.entries(kept).map(([name, values]) => [name, padded(values)]));
  }
}

function empty() {
  return { busy: [], load: [], speed: [], share: [] };
}

function push(values, value) {
  values.push(value ?? null);
  if (values.length > KEPT) values.shift();
}

function padded(values) {
  return [...new Array(KEPT - values.length).fill(null), ...values];
}

export class WorkerDialog {
  constructor(history) {
    this.history = history;
    this.node = document.getElementById("worker-dialog");
    this.address = null;
    this.node.addEventListener("close", () => (this.address = null));
    this.node.addEventListener("click", (event) => event.target === this.node && this.node.close());
  }

  open(worker, now) {
    this.address = worker.address;
    const isEncoder = "jobs" in worker;
    this.title = h("h2", { id: "worker-title" }, worker.name);
    this.state = h("span", { class: "tag" });
    this.reason = h("p", { class: "notice" });
    this.facts = h("dl", { class: "facts" });
    this.charts = isEncoder ? encoderCharts() : pdCharts();
    this.passing = h("p", { class: "soft small" });
    this.failures = h("ul", { class: "failures" });
    this.node.replaceChildren(
      h("div", { class: "row" }, this.title, this.state, h("span", { class: "grow" }),
        h("button", { type: "button", class: "quiet", onclick: () => this.node.close() }, "Close")),
      this.reason, this.facts, h("div", { class: "grid two" }, this.charts.map((chart) => chart.node)), this.passing, this.failures,
    );
    this.update(now);
    this.node.showModal();
  }

  update(now) {
    if (this.address === null || !now) return;
    const worker = [...now.encoders, ...now.pd_workers].find((one) => one.address === this.address);
    const state = worker?.state ?? "lost";
    setText(this.state, worker ? stateWord(state) : "Gone");
    setAttr(this.state, "class", `tag ${grade(state)}`);
    const reason = worker ? (state === "serving" ? "" : worker.reason) : "It has left the registry: it ended, or cannot reach the store.";
    setText(this.reason, reason);
    setAttr(this.reason, "class", `notice ${grade(state)}`);
    this.reason.hidden = !reason;
    if (!worker) return;
    this.facts.replaceChildren(...facts(worker).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
    for (const chart of this.charts) chart.update(this.history.of(this.address));
    const here = now.requests.filter((request) => request.pd_worker === worker.name).length;
    setText(this.passing, "jobs" in worker ? "" : `${count(here)} of the newest requests decode here.`);
    const failures = now.failures.filter((failure) => failure.where === worker.name).slice(0, 4);
    this.failures.replaceChildren(...failures.map((failure) => h("li", {}, h("strong", {}, failure.what), h("p", { class: "soft small" }, failure.remedy))));
  }
}

function facts(worker) {
  const common = [["Address", worker.address], ["Model", worker.model], ["Kind", worker.kind || "–"],
    ["Busy", percent(worker.busy)], ["Memory", memory(worker) || "–"], ...(worker.gpu ? [["GPU", percent(worker.gpu.use)]] : [])];
  if ("jobs" in worker) {
    return [...common, ["Jobs", count(worker.jobs)], ["Work left", seconds(worker.work_seconds)], ["Done", count(worker.done)],
      ["An item takes", worker.encode_ms === null ? "–" : seconds(worker.encode_ms / 1000)]];
  }
  return [...common, ["Role", worker.role ?? "both"], ["Requests of this proxy", count(worker.requests)], ["Running", count(worker.running)], ["Waiting", count(worker.waiting)],
    ["KV cache", percent(worker.kv_usage)], ["Encoder cache", percent(worker.cache_usage)], ["Output", `${rate(worker.tokens_per_second)} tokens/s`]];
}

/** A function that makes charts of one group. */
function charting() {
  const group = new ChartGroup();
  return (title, name, label, color, format, top = null) =>
    new TimeChart({ title, lines: [{ name, label, color }], format, top, step: 1, span: "5 min ago", group });
}

function encoderCharts() {
  const chart = charting();
  return [chart("Busy", "busy", "of 10 s", "encode", percent, 1), chart("Jobs", "load", "jobs", "encode", count), chart("Time of an item", "speed", "", "load", (ms) => seconds(ms === null || ms === undefined ? NaN : ms / 1000))];
}

function pdCharts() {
  const chart = charting();
  return [chart("Busy", "busy", "of 10 s", "decode", percent, 1), chart("Tokens", "speed", "tokens/s", "decode", rate), chart("KV cache", "share", "used", "prefill", percent, 1)];
}
