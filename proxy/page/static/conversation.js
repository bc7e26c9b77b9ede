// The conversation: messages as they were sent, and an answer that grows.

import { copyButton, h, oncePerFrame, setText } from "./dom.js";
import { count, rate, seconds } from "./format.js";

/** The list of messages. Screen readers hear an answer once it is whole. */
export class Conversation {
  constructor() {
    this.node = h("div", { class: "log", role: "log", "aria-label": "Conversation", "aria-live": "polite", tabindex: "0" });
  }

  clear() {
    this.node.replaceChildren();
  }

  ask(text, media) {
    const message = h(
      "article", { class: "message mine" },
      h("h2", { class: "offscreen" }, "You"),
      media.length ? h("div", { class: "thumbs" }, media.map((one) => mediaView(one))) : null,
      text ? h("p", { class: "text" }, text) : null,
    );
    this.node.append(message);
    this.#scroll(true);
    return message;
  }

  answer(model) {
    const answer = new Answer(model, () => this.#scroll(false));
    this.node.append(answer.node);
    this.#scroll(true);
    return answer;
  }

  /** Follows the answer, unless the reader has scrolled up. */
  #scroll(always) {
    const node = this.node;
    if (always || node.scrollHeight - node.scrollTop - node.clientHeight < 120) node.scrollTop = node.scrollHeight;
  }
}

/** A picture, video or sound as it was added. */
export function mediaView(media) {
  if (media.isSound) return h("audio", { controls: true, src: media.url, "aria-label": media.name });
  if (media.isVideo) return h("video", { controls: true, muted: true, src: media.url, "aria-label": media.name });
  return h("img", { src: media.url, alt: media.name, title: media.name });
}

/** One answer while it is made. Text is added once a frame, as text and nothing else. */
class Answer {
  constructor(model, grown) {
    this.text = "";
    this.calls = [];
    this.pieces = 0;
    this.#started = performance.now();
    this.#thought = h("details", { class: "reasoning", hidden: true }, h("summary", {}, "Reasoning"), (this.#thoughtText = h("p", { class: "soft small" })));
    this.#body = h("p", { class: "text" });
    this.#letters = document.createTextNode("");
    this.#body.append(this.#letters);
    this.#calls = h("div");
    this.#meta = h("p", { class: "meta" }, "Waiting for the first token …");
    this.node = h(
      "article", { class: "message theirs busy", "aria-busy": "true" },
      h("h3", { class: "who" }, model),
      this.#thought, this.#body, this.#calls,
      h("div", { class: "row" }, this.#meta, (this.#copy = copyButton(() => this.text))),
    );
    this.#copy.hidden = true;
    this.#flush = oncePerFrame(() => {
      this.#show();
      grown();
    });
  }

  #started;
  #first = null;
  #ended = null;
  #thought;
  #thoughtText;
  #reasoning = "";
  #body;
  #letters;
  #calls;
  #meta;
  #copy;
  #flush;
  #end = "";
  usage = null;

  /** What `pieceOf` read of one event. */
  add(piece) {
    if (piece.text || piece.calls || piece.reasoning) {
      this.#first ??= performance.now();
      this.pieces += 1;
      // Open while the model reasons; the answer closes it, once.
      if (!this.#reasoning && piece.reasoning) this.#thought.open = true;
      if (!this.text && piece.text) this.#thought.open = false;
      this.#reasoning += piece.reasoning ?? "";
      this.text += piece.text ?? "";
      this.#addCalls(piece.calls ?? []);
    }
    if (piece.finish) this.#end = piece.finish;
    if (piece.usage) this.usage = piece.usage;
    this.#flush();
  }

  #addCalls(calls) {
    for (const call of calls) {
      const known = (this.calls[call.index ?? 0] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      if (call.id) known.id = call.id;
      known.function.name += call.function?.name ?? "";
      known.function.arguments += call.function?.arguments ?? "";
    }
    if (calls.length) {
      this.#calls.replaceChildren(...this.calls.map((call) => h("pre", { class: "code" }, `${call.function.name}(${call.function.arguments})`)));
    }
  }

  /** Ends the answer. `end`: "" as the server said, "stopped", or an Error. */
  finish(end = "") {
    this.#ended = performance.now();
    this.node.classList.remove("busy");
    if (end instanceof Error) {
      this.node.append(h("p", { class: "notice bad", role: "alert" }, end.message));
      this.#end = "failed";
    } else if (end) this.#end = end;
    this.#copy.hidden = !this.text;
    this.#show();
    this.node.setAttribute("aria-busy", "false");
  }

  #show() {
    this.#thought.hidden = !this.#reasoning;
    setText(this.#thoughtText, this.#reasoning);
    this.#letters.appendData(this.text.slice(this.#letters.length));
    setText(this.#meta, this.#summary());
  }

  get firstToken() {
    return this.#first === null ? null : (this.#first - this.#started) / 1000;
  }

  #summary() {
    if (this.#first === null && this.#ended === null) return "Waiting for the first token …";
    const tokens = this.usage?.completion_tokens ?? this.pieces;
    const last = this.#ended ?? performance.now();
    const parts = [];
    if (this.#end === "length") parts.push("cut off at max tokens");
    else if (this.#end === "stopped") parts.push("stopped");
    else if (this.#end === "failed") parts.push("failed");
    if (this.usage) parts.push(`${count(tokens)} tokens`);
    if (this.#first !== null) parts.push(`first after ${seconds(this.firstToken)}`);
    if (tokens > 1 && this.#first !== null && last > this.#first) parts.push(`${rate((1000 * (tokens - 1)) / (last - this.#first))} tokens/s`);
    parts.push(`${seconds((last - this.#started) / 1000)} in all`);
    return parts.join(" · ");
  }
}
