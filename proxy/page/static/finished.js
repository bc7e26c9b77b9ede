// The list of requests that have ended: the newest, the slowest or those that failed, of one model or of all.

import { call } from "./api.js";
import { h, reconcile, setAttr, setText } from "./dom.js";
import { count, duration, seconds } from "./format.js";

const POLL_MS = 3000;
const LIMIT = 50;
const CHOICES = [
  { label: "Newest", query: { order: "newest" } },
  { label: "Slowest", query: { order: "slowest" } },
  { label: "Failed", query: { failed: "true" } },
];
const HEADS = [["Ended", ""], ["Request", ""], ["Model", "wide-only"], ["Status", ""], ["Items", "number wide-only"], ["Tokens", "number"], ["First token", "number wide-only"], ["Total", "number"]];

export class FinishedCard {
  #timer = null;
  #asked = 0;

  /** `open(id)` shows a request's record. */
  constructor(open) {
    this.open = open;
    this.now = null;
    this.rows = h("tbody");
    this.none = h("p", { class: "soft" }, "Loading …");
    this.tabs = CHOICES.map((choice) => h("button", { type: "button", class: "tab", onclick: () => this.#choose(choice) }, choice.label));
    this.model = h("select", { class: "small", "aria-label": "Model of the finished requests", hidden: true, onchange: () => this.#look() }, h("option", { value: "" }, "All models"));
    this.node = h("section", { class: "card", "aria-label": "Finished requests" },
      h("div", { class: "row" }, h("h2", {}, "Finished requests"), h("span", { class: "grow" }), this.model, this.tabs),
      h("div", { class: "scroll-x" }, h("table", { class: "requests" },
        h("caption", { class: "offscreen" }, "Requests that have ended"),
        h("thead", {}, h("tr", {}, HEADS.map(([name, extra]) => h("th", { scope: "col", class: extra }, name)))), this.rows)),
      this.none);
    this.#mark(CHOICES[0]);
  }

  start() {
    this.#look();
    this.#timer = setInterval(() => document.hidden || this.#look(), POLL_MS);
  }

  stop() {
    clearInterval(this.#timer);
  }

  /** The server's time: how long ago a request has ended is told by it. */
  tick(time) {
    this.now = time ?? this.now;
    if (this.reply) this.#draw(this.reply);
  }

  #mark(choice) {
    this.choice = choice;
    CHOICES.forEach((one, index) => setAttr(this.tabs[index], "aria-pressed", String(one === choice)));
  }

  #choose(choice) {
    this.#mark(choice);
    this.#look();
  }

  async #look() {
    const asked = (this.#asked += 1);
    const query = new URLSearchParams({ ...this.choice.query, limit: LIMIT, ...(this.model.value ? { model: this.model.value } : {}) });
    try {
      const reply = await (await call(`cluster/requests?${query}`)).json();
      if (asked === this.#asked) this.#draw((this.reply = reply));
    } catch {
      // The feed says what is wrong, and the next look follows.
    }
  }

  #draw({ requests, models }) {
    this.#drawModels(models);
    reconcile(this.rows, requests, (request) => request.id, () => finishedRow(this.open, () => this.now));
    setText(this.none, this.choice.query.failed ? "No request has failed." : "No request has ended yet.");
    this.none.hidden = requests.length > 0;
  }

  #drawModels(models) {
    this.model.hidden = models.length < 2;
    if (models.join("\n") === this.models) return;
    this.models = models.join("\n");
    const before = this.model.value;
    this.model.replaceChildren(h("option", { value: "" }, "All models"), ...models.map((name) => h("option", { value: name }, name)));
    this.model.value = models.includes(before) ? before : "";
  }
}

function finishedRow(open, now) {
  const cells = HEADS.map(([, extra]) => h("td", { class: extra }));
  const [ended, id, model, status, items, tokens, first, total] = cells;
  const link = h("button", { type: "button", class: "link", onclick: () => open(link.textContent) });
  const mark = h("span", { class: "tag" });
  id.append(link);
  status.append(mark);
  return {
    node: h("tr", {}, cells),
    update(request) {
      setText(ended, now() === null ? "" : `${duration(Math.max(0, now() - request.ended))} ago`);
      setText(link, request.id);
      setText(model, request.model);
      setText(mark, request.status === 499 ? "client left" : request.status);
      setAttr(mark, "class", `tag ${request.status < 400 ? "good" : request.status < 500 ? "warn" : "bad"}`);
      setText(items, count(request.items));
      setText(tokens, count(request.tokens));
      setText(first, seconds(request.ttft));
      setText(total, seconds(request.seconds));
      setAttr(total, "title", request.pd_worker ? `at ${request.pd_worker}` : null);
    },
  };
}
