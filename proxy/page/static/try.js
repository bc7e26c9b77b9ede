// The view Try: ask a model, and see where the request's time went.

import { address, apiKey, call, events, onKeyChange } from "./api.js";
import { askForKey } from "./key.js";
import { Composer } from "./composer.js";
import { Conversation } from "./conversation.js";
import { copyButton, h, setAttr, setText } from "./dom.js";
import { demoPicture } from "./media.js";
import { fetchRecord, noteAsked } from "./record.js";
import { fetchOptions, makeRequest, missing, modeOf, pieceOf, userMessage } from "./request.js";
import { curlLines, pythonLines } from "./snippets.js";
import { waterfall } from "./waterfall.js";

const STAGES = [
  ["Fetch", "the proxy fetches and hashes pictures or sound"],
  ["Queue", "it waits for a worker"],
  ["Preprocess", "an encoder worker decodes and resizes an item"],
  ["Encode", "its tower computes the item's embedding"],
  ["Save", "the embedding goes to the store"],
  ["Load", "a PD worker gets it: from the store, by shared memory, or from the encoder worker"],
  ["Prefill", "the PD worker computes the prompt, up to the first token"],
  ["Decode", "it generates the answer, token by token"],
];
const POLL_MS = 400;
/** The record is complete a moment after the answer's last byte. */
const LAST_TRIES = 12;

export class TryView {
  constructor(root) {
    this.history = [];
    this.running = null;
    this.sent = null;
    this.talk = new Conversation();
    this.composer = new Composer({
      send: () => this.send(), stop: () => this.running?.abort(), reset: () => this.reset(), changed: () => this.#showCode(),
    });
    this.empty = h("div", { class: "empty" });
    this.time = h("div", { class: "card-body" });
    this.codeKind = "curl";
    this.code = h("pre", { class: "code", tabindex: "0", "aria-label": "The request as code" });
    root.append(h("div", { class: "try-grid" }, this.#talkCard(), h("div", { class: "column" }, this.#timeCard(), this.#codeCard())));
    this.#noTime();
    onKeyChange(() => this.loadModels());
  }

  async show() {
    await Promise.all([this.loadModels(), this.#loadExamples()]);
  }

  async loadModels() {
    try {
      const reply = await (await call("v1/models")).json();
      this.composer.setModels(reply.data);
      this.composer.say(reply.data.length ? "" : "No model is served yet: its PD worker is still starting.");
      this.#fillEmpty();
    } catch (error) {
      this.composer.say(error.message);
      if (error.status === 401) askForKey(error.message);
    }
  }

  reset() {
    this.running?.abort();
    this.running = null;
    this.composer.setBusy(false);
    this.history = []; // an answer that still ends belongs to the old one
    this.sent = null;
    this.talk.clear();
    this.composer.clear();
    this.empty.hidden = false;
    this.#noTime();
    this.composer.text.focus();
  }

  async send() {
    if (this.running) return;
    const { composer } = this;
    if (!composer.models.length) await this.loadModels(); // the server may be back
    if (!composer.models.length) return;
    const text = composer.text.value.trim();
    const media = composer.media;
    const lack = missing(composer.chosen, text, media);
    if (lack) return composer.say(lack);
    let request;
    try {
      request = makeRequest(composer.chosen, this.history, text, media, composer.options.read());
    } catch (error) {
      return composer.say(error.message);
    }
    const model = composer.chosen;
    composer.clear();
    this.empty.hidden = true;
    this.sent = request;
    this.#showCode();
    const question = this.talk.ask(text, media);
    const answer = this.talk.answer(model.id);
    const { history } = this;
    const kept = await this.#run(request, answer, text);
    if (kept && modeOf(model) === "chat") history.push(userMessage(text, media), assistantMessage(answer));
    if (!kept && history === this.history) {
      question.classList.add("failed");
      if (!composer.text.value) composer.text.value = text;
      if (!composer.media.length) composer.setMedia(media);
    }
    composer.text.focus({ preventScroll: true });
  }

  /** Whether the answer is worth keeping in the conversation. */
  async #run(request, answer, text) {
    const running = (this.running = new AbortController());
    this.composer.setBusy(true);
    this.#noTime("The request is on its way …");
    const id = crypto.randomUUID?.() ?? `page-${Math.random().toString(36).slice(2)}${Date.now()}`;
    const watch = this.#watchTime(id);
    try {
      const reply = await call(request.path, fetchOptions(request, id, running.signal));
      watch.id = reply.headers.get("x-request-id") ?? id;
      noteAsked(watch.id, text);
      for await (const { data } of events(reply)) {
        if (data !== "[DONE]") answer.add(pieceOf(data));
      }
      answer.finish();
      return true;
    } catch (error) {
      if (error.status === 401) askForKey(error.message);
      const stopped = error.name === "AbortError";
      answer.finish(stopped ? "stopped" : error);
      return stopped && answer.text !== "";
    } finally {
      watch.over = true;
      if (this.running === running) {
        this.running = null;
        this.composer.setBusy(false);
      }
    }
  }

  /** Shows the request's record while it runs, and once more when it has ended. */
  #watchTime(id) {
    const watch = { id, over: false };
    this.watched = watch;
    const look = async () => {
      let tries = 0;
      while (this.watched === watch && tries < LAST_TRIES) {
        await new Promise((resolve) => setTimeout(resolve, watch.over ? 150 : POLL_MS));
        if (watch.over) tries += 1;
        const record = await fetchRecord(watch.id);
        if (this.watched !== watch) return;
        if (record instanceof Error) {
          if (watch.over && tries >= LAST_TRIES) this.#noTime(record.message);
          continue;
        }
        this.time.replaceChildren(waterfall(record));
        if (record.seconds !== null) return;
      }
    };
    look();
    return watch;
  }

  #talkCard() {
    const card = h("section", { class: "card talk", "aria-label": "Ask" }, h("h1", { class: "offscreen" }, "Try"), h("div", { class: "scroll" }, this.empty, this.talk.node), this.composer.node);
    const files = (event) => [...(event.dataTransfer ?? event.clipboardData)?.files ?? []];
    card.addEventListener("dragover", (event) => {
      event.preventDefault();
      card.classList.add("drop");
    });
    card.addEventListener("dragleave", (event) => card.contains(event.relatedTarget) || card.classList.remove("drop"));
    card.addEventListener("drop", (event) => {
      event.preventDefault();
      card.classList.remove("drop");
      if (files(event).length) this.composer.addFiles(files(event));
    });
    card.addEventListener("paste", (event) => {
      if (!files(event).length) return;
      event.preventDefault();
      this.composer.addFiles(files(event));
    });
    return card;
  }

  #timeCard() {
    return h("section", { class: "card", id: "time", "aria-label": "Where the time went" }, h("h2", {}, "Where the time went"), this.time);
  }

  #codeCard() {
    const tab = (kind, label) => h("button", { type: "button", class: "tab", "aria-pressed": String(kind === this.codeKind), onclick: () => this.#chooseCode(kind) }, label);
    this.codeTabs = { curl: tab("curl", "curl"), python: tab("python", "Python") };
    return h("section", { class: "card", "aria-label": "The same as code" },
      h("div", { class: "row" }, h("h2", {}, "The same as code"), h("span", { class: "grow" }), ...Object.values(this.codeTabs), copyButton(() => this.code.textContent)),
      this.code);
  }

  #chooseCode(kind) {
    this.codeKind = kind;
    for (const [name, tab] of Object.entries(this.codeTabs)) setAttr(tab, "aria-pressed", String(name === kind));
    this.#showCode();
  }

  /** The lines of what is in the form, and of what was asked while the form is empty. */
  #showCode() {
    if (!this.codeTabs) return;
    setText(this.code, this.#code());
  }

  #code() {
    const { chosen, text, media, options } = this.composer;
    let request = this.sent;
    if (chosen && !missing(chosen, text.value.trim(), media)) {
      try {
        request = makeRequest(chosen, this.history, text.value.trim(), media, options.read());
      } catch {
        // The form says what is wrong.
      }
    }
    if (!request && chosen && modeOf(chosen) === "chat") request = makeRequest(chosen, [], "Which shapes can you see?", [], { sampling: {} });
    if (!request) return "# Ask something: its lines for a shell and for Python appear here.";
    const base = address("").href;
    return (this.codeKind === "curl" ? curlLines : pythonLines)(base, request, apiKey() !== "");
  }

  /** Without a request: the stages that a request goes through. */
  #noTime(text = "Ask something: its stages appear here, each with its worker and its time.") {
    this.watched = null;
    const stages = STAGES.map(([name, does]) => h("div", {}, h("dt", {}, h("span", { class: `swatch stage-${name.toLowerCase()}` }), name), h("dd", { class: "soft" }, does)));
    this.time.replaceChildren(h("p", { class: "soft" }, text), h("dl", { class: "stages" }, stages));
  }

  async #loadExamples() {
    this.examples ??= await fetch(address("page/examples.json")).then((reply) => reply.json()).catch(() => []);
    this.#fillEmpty();
  }

  #fillEmpty() {
    const mode = this.composer.mode;
    const cards = mode === "chat" ? (this.examples ?? []).map((example) => this.#exampleCard(example)) : [];
    const [title, hint] = {
      chat: ["Ask about a picture", "Drop pictures here, paste them, or take one of the demo's."],
      speech: ["Write speech down", "Drop a sound file here, or dial tones below: the audio demo hears digits."],
      picture: ["Read a picture", "Drop one picture here: the model writes down what it shows."],
      text: ["Write a text", "The model's encoder reads it, its decoder answers."],
    }[mode];
    this.empty.replaceChildren(h("h2", { class: "title" }, title), h("p", { class: "soft" }, hint), h("ul", { class: "examples", "aria-label": "Examples" }, cards));
  }

  #exampleCard({ pictures, question }) {
    const ask = async () => {
      this.reset();
      try {
        this.composer.setMedia(await Promise.all(pictures.map(demoPicture)));
        this.composer.text.value = question;
        await this.send();
      } catch (error) {
        this.composer.say(error.message);
      }
    };
    const thumbs = pictures.map((name) => h("img", { src: address(`page/examples/${encodeURIComponent(name)}`).href, alt: "", width: 56, height: 56, loading: "lazy" }));
    return h("li", {}, h("button", { type: "button", class: "example", onclick: ask }, h("span", { class: "pair" }, thumbs), h("span", {}, question)));
  }
}

function assistantMessage(answer) {
  const calls = answer.calls.filter(Boolean);
  return { role: "assistant", content: answer.text || (calls.length ? null : ""), ...(calls.length ? { tool_calls: calls } : {}) };
}
