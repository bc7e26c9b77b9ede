// The list of requests that have ended: the newest, the slowest or those that failed, of one model or of all.

import { call } from "./api.js";
import { h, reconcile, requestTable, setAttr, setText } from "./dom.js";
import { count, duration, plural, seconds } from "./format.js";

/** Seconds between two readings of the list, and its length. */
const [EVERY, LIMIT] = [3, 50];
const CHOICES = { Newest: { order: "newest" }, Slowest: { order: "slowest" }, Failed: { failed: "true" } };
const HEADS = [["Ended", ""], ["Request", ""], ["Model", "wide-only"], ["Status", ""], ["Items", "number wide-only"], ["Tokens", "number"], ["Tokens/s", "number wide-only"], ["First token", "number wide-only"], ["Total", "number"]];

export class FinishedCard {
  #asked = 0;
  #readAt = -Infinity;
  #models = [];

  /** `open(id)` shows a request's record. */
  constructor(open) {
    this.open = open;
    this.choice = "Newest";
    this.rows = h("tbody");
    this.none = h("p", { class: "soft" });
    this.tabs = Object.keys(CHOICES).map((name) => h("button", { type: "button", class: "tab", onclick: () => this.#look((this.choice = name)) }, name));
    this.model = h("select", { class: "small", "aria-label": "Model of the finished requests", hidden: true, onchange: () => this.#look() }, h("option", { value: "" }, "All models"));
    this.node = h("section", { class: "card", "aria-label": "Finished requests" },
      h("div", { class: "row" }, h("h2", {}, "Finished requests"), h("span", { class: "grow" }), this.model, this.tabs),
      requestTable("Requests that have ended", HEADS, this.rows), this.none);
  }

  /** Called every second with the server's time, by which it is told how long ago a request has ended. */
  tick(time) {
    this.time = time;
    if (Math.abs(time - this.#readAt) >= EVERY) this.#look();
    else if (this.reply) this.#draw();
  }

  async #look() {
    const asked = (this.#asked += 1);
    this.#readAt = this.time;
    for (const tab of this.tabs) setAttr(tab, "aria-pressed", String(tab.textContent === this.choice));
    const query = new URLSearchParams({ ...CHOICES[this.choice], limit: LIMIT, model: this.model.value });
    try {
      const reply = await (await call(`cluster/requests?${query}`)).json();
      if (asked === this.#asked) this.#draw((this.reply = reply));
    } catch {
      // The feed says what is wrong, and the next reading follows.
    }
  }

  #draw() {
    const { requests, models } = this.reply;
    this.model.hidden = models.length < 2 && !this.model.value;
    const added = models.filter((name) => !this.#models.includes(name));
    this.#models.push(...added);
    this.model.append(...added.map((name) => h("option", { value: name }, name)));
    reconcile(this.rows, requests, (request) => request.id, () => finishedRow(this.open, () => this.time));
    setText(this.none, requests.length ? "" : this.choice === "Failed" ? "No request has failed." : "No request has ended yet.");
  }
}

function finishedRow(open, now) {
  const cells = HEADS.map(([, extra]) => h("td", { class: extra }));
  const [ended, id, model, status, items, tokens, rate, first, total] = cells;
  const link = h("button", { type: "button", class: "link", onclick: () => open(link.textContent) });
  const mark = h("span", { class: "tag" });
  id.append(link);
  status.append(mark);
  return {
    node: h("tr", {}, cells),
    update(request) {
      setText(ended, `${duration(Math.max(0, now() - request.ended))} ago`);
      setText(link, request.id);
      setText(model, request.model);
      setText(mark, request.status === 499 ? "client left" : request.status);
      setAttr(mark, "class", `tag ${request.status < 400 ? "good" : request.status < 500 ? "warn" : "bad"}`);
      setText(items, request.media_tokens ? `${count(request.items)} (${plural(request.media_tokens, "token")})` : count(request.items));
      setText(tokens, count(request.tokens));
      setText(rate, decodeRate(request));
      setText(first, seconds(request.ttft));
      setText(total, seconds(request.seconds));
      setAttr(total, "title", request.pd_worker ? `at ${request.pd_worker}` : null);
    },
  };
}

/** Tokens per second after the first one, of all choices together; nothing where there is but one. */
function decodeRate({ tokens, ttft, seconds: total }) {
  return ttft === null || tokens < 2 || total <= ttft ? "" : count(Math.round((tokens - 1) / (total - ttft)));
}
