// The view Watch: the cluster as it is now, and up to its last hour.

import { ChartGroup, TimeChart } from "./chart.js";
import { h, oncePerFrame, reconcile, requestTable, setAttr, setText } from "./dom.js";
import { Feed } from "./feed.js";
import { FinishedCard } from "./finished.js";
import { count, duration, percent, plural, rate, seconds } from "./format.js";
import { askForKey } from "./key.js";
import { Pools, upWords } from "./pools.js";
import { RecordDialog } from "./record.js";
import { Series } from "./series.js";
import { stage } from "./waterfall.js";
import { WorkerDialog, WorkerHistory } from "./worker.js";

const CHARTS = [
  { title: "Per second", format: rate, lines: [{ name: "requests", label: "requests", color: "prefill" }, { name: "items", label: "items", color: "encode" }, { name: "errors", label: "errors", color: "bad" }] },
  { title: "Busy", format: percent, top: 1, lines: [{ name: "encoder_busy", label: "encode", color: "encode" }, { name: "pd_busy", label: "PD", color: "decode" }] },
  { title: "Proxy", format: count, lines: [{ name: "in_flight", label: "in flight", color: "load" }, { name: "queued", label: "queued", color: "warn" }] },
  { title: "Output", format: rate, lines: [{ name: "tokens", label: "tokens/s", color: "decode" }] },
  { title: "Hit rate", format: percent, top: 1, lines: [{ name: "hit_rate", label: "reused", color: "load" }] },
  { title: "Goodput", format: percent, top: 1, lines: [{ name: "met", label: "within SLO", color: "good" }] },
  { title: "KV cache", format: percent, top: 1, lines: [{ name: "kv_usage", label: "used", color: "prefill" }] },
  { title: "Workers", format: count, lines: [{ name: "encoders", label: "encode", color: "encode" }, { name: "pd_workers", label: "PD", color: "decode" }, { name: "desired_encoders", label: "desired", color: "warn", dashed: true }] },
];
/** Minutes that the charts can show. */
const SPANS = [1, 5, 15, 60];

export class WatchView {
  constructor(root) {
    this.now = null;
    this.series = new Series();
    this.history = new WorkerHistory();
    this.dialog = new WorkerDialog(this.history);
    this.draw = oncePerFrame(() => this.#draw());
    this.feed = new Feed({
      history: (data) => (this.series.setHistory(data), this.draw()),
      snapshot: (data) => this.#take(data),
      state: (name, message) => this.#state(name, message),
    });
    this.pools = new Pools((worker) => this.dialog.open(worker, this.now));
    this.record = new RecordDialog();
    this.finished = new FinishedCard((id) => this.record.open(id));
    const group = new ChartGroup();
    this.charts = CHARTS.map((one) => new TimeChart({ ...one, group }));
    this.chartsTitle = h("h2");
    this.tiles = h("dl", { class: "tiles" });
    root.append(this.#strip(), h("div", { class: "live-data" }, this.tiles, this.pools.node,
      this.#chartsSection(),
      h("div", { class: "lists" }, h("div", { class: "column" }, this.#requestsCard(), this.finished.node), this.#failuresCard())));
    this.#choose(15);
    this.root = root;
    this.root.classList.add("no-data");
  }

  show() {
    this.feed.start();
  }

  hide() {
    this.feed.stop();
  }

  #chartsSection() {
    this.spans = SPANS.map((minutes) => h("button", { type: "button", class: "tab", onclick: () => this.#choose(minutes) }, minutes === 60 ? "1 h" : `${minutes} min`));
    return h("section", { "aria-label": "Over time" }, h("div", { class: "row over" }, this.chartsTitle, h("span", { class: "grow" }), this.spans),
      h("div", { class: "charts" }, this.charts.map((chart) => h("div", { class: "card" }, chart.node))));
  }

  /** Shows so many minutes in all charts. */
  #choose(minutes) {
    this.minutes = minutes;
    SPANS.forEach((one, index) => setAttr(this.spans[index], "aria-pressed", String(one === minutes)));
    const span = minutes === 60 ? "1 h" : `${minutes} min`;
    setText(this.chartsTitle, `The last ${minutes === 1 ? "minute" : minutes === 60 ? "hour" : `${minutes} minutes`}`);
    for (const chart of this.charts) chart.span = `${span} ago`;
    this.draw();
  }

  #take(now) {
    this.now = now;
    this.series.add(now);
    this.history.add(now);
    this.draw();
  }

  #strip() {
    this.pill = h("span", { class: "pill", role: "status" }, "Connecting …");
    this.about = h("span", { class: "soft small" });
    this.newer = h("button", { type: "button", class: "quiet small", hidden: true, onclick: () => location.reload() }, "This page is of another version: reload it");
    this.message = h("p", { class: "notice", hidden: true });
    this.give = h("button", { type: "button", class: "primary", hidden: true, onclick: () => askForKey(this.message.textContent) }, "Give an API key");
    return h("div", { class: "strip" }, h("h1", {}, "The cluster, live"), this.pill, this.about, this.newer, this.message, this.give);
  }

  #state(name, message) {
    const marks = { live: "good", connecting: "", waiting: "warn", key: "warn", absent: "bad", paused: "" };
    const short = { live: "Live", connecting: "Connecting …", waiting: "Reconnecting", key: "Give an API key", absent: "No live data", paused: "Paused" };
    setText(this.pill, short[name]);
    setAttr(this.pill, "class", `pill ${marks[name]}`);
    const explain = ["waiting", "key", "absent"].includes(name);
    this.message.hidden = !explain;
    setText(this.message, explain ? message : "");
    setAttr(this.message, "class", `notice ${marks[name]}`);
    this.give.hidden = name !== "key";
    setAttr(this.root, "data-state", name);
    if (name === "key") askForKey(message);
  }

  #draw() {
    const { now } = this;
    const values = this.series.last(this.minutes);
    for (const chart of this.charts) chart.update(values);
    if (!now) return;
    this.finished.tick(now.time);
    this.root.classList.remove("no-data");
    setText(this.about, upWords(now));
    this.version ??= now.version;
    this.newer.hidden = this.version === now.version;
    setAttr(this.root, "data-time", Math.floor(now.time));
    reconcile(this.tiles, tilesOf(now), ([name]) => name, tileRow);
    this.pools.update(now);
    this.dialog.update(now);
    reconcile(this.rows, now.requests.slice(0, 64), (request) => request.id, () => requestRow((id) => this.record.open(id)));
    this.noRequests.hidden = now.requests.length > 0;
    reconcile(this.failures, now.failures.slice(0, 32), (failure) => `${failure.where} ${failure.what}`, (failure) => failureRow(failure, () => this.now.time));
    this.noFailures.hidden = now.failures.length > 0;
  }

  #requestsCard() {
    this.rows = h("tbody");
    this.noRequests = h("p", { class: "soft" }, "No request is in flight.");
    const heads = [["Request", ""], ["Model", "wide-only"], ["Stage", ""], ["Items", "number"], ["Tokens", "number"], ["PD worker", "wide-only"], ["Age", "number"]];
    return h("section", { class: "card", "aria-label": "Requests in flight" }, h("h2", {}, "Requests in flight"),
      requestTable("The newest requests in flight", heads, this.rows), this.noRequests);
  }

  #failuresCard() {
    this.failures = h("ul", { class: "failures", tabindex: "0", "aria-label": "Failures" });
    this.noFailures = h("p", { class: "soft" }, "Nothing has failed.");
    return h("section", { class: "card", "aria-label": "Last failures" }, h("h2", {}, "Last failures"), this.failures, this.noFailures);
  }
}

function tilesOf({ proxy, rates, flows, goodput }) {
  const slo = `SLO ${seconds(goodput.ttft_slo)} / ${seconds(goodput.tpot_slo)}`;
  return [
    ["In flight", count(proxy.in_flight), `${count(proxy.queued)} queued of ${count(proxy.max_queue)}`, ""],
    ["Requests", `${rate(rates.requests)}/s`, rates.errors > 0 ? `${rate(rates.errors)}/s fail` : "none fails", rates.errors > 0 ? "bad" : ""],
    ["Output", `${rate(rates.tokens)} tok/s`, `${rate(flows.encoded.items)} items/s encoded`, ""],
    ["Hit rate", percent(rates.hit_rate), saved(rates), ""],
    ["Within SLO", percent(goodput.met), slo, goodput.met !== null && goodput.met < 0.9 ? "warn" : ""],
    ["First token", seconds(goodput.ttft_p50), `P99 ${seconds(goodput.ttft_p99)}`, ""],
    ["Between tokens", seconds(goodput.tpot_p50), `P99 ${seconds(goodput.tpot_p99)}`, ""],
  ];
}

/** What the hits of the last minute have saved: items that no encoder worker computed, and its time for them. */
function saved({ hits, saved_seconds: time }) {
  if (!hits) return "of items, 1 min";
  return `${plural(hits, "item")} not encoded in 1 min${time === null ? "" : `, ${seconds(time)} saved`}`;
}

function tileRow([name]) {
  const value = h("dd", { class: "big" });
  const note = h("dd", { class: "soft small" });
  const node = h("div", {}, h("dt", {}, name), value, note);
  return {
    node,
    update([, text, detail, mark]) {
      setText(value, text);
      setText(note, detail);
      setAttr(node, "class", `tile ${mark}`);
    },
  };
}

function requestRow(open) {
  const cells = ["id", "model", "stage", "items", "tokens", "worker", "age"].map((name) => h("td", { class: { items: "number", tokens: "number", age: "number", model: "wide-only", worker: "wide-only" }[name] ?? "" }));
  const [id, model, at, items, tokens, worker, age] = cells;
  const link = h("button", { type: "button", class: "link", onclick: () => open(link.textContent) });
  id.append(link);
  const chip = h("span", { class: "chip" });
  at.append(chip);
  return {
    node: h("tr", {}, cells),
    update(request) {
      setText(link, request.id);
      setText(model, request.model);
      setText(chip, request.stage);
      setAttr(chip, "class", `chip stage-${stage(request.stage)}`);
      setText(items, request.items ? `${request.items_ready}/${request.items}` : "–");
      setText(tokens, count(request.tokens));
      setText(worker, (request.pd_worker || "–") + (request.attempt > 1 ? ` (attempt ${request.attempt})` : ""));
      setText(age, seconds(request.age));
    },
  };
}

function failureRow(failure, time) {
  const when = h("span", { class: "soft small" });
  return {
    node: h("li", {}, h("p", {}, h("strong", {}, failure.what), failure.where ? h("code", {}, failure.where) : null, when), h("p", { class: "soft" }, failure.remedy)),
    update(current) {
      const times = current.count > 1 ? `, ${count(current.count)} times` : "";
      setText(when, `${duration(Math.max(0, time() - current.time))} ago${times}`);
    },
  };
}
