// The form that a question is written in: model, text, pictures or sound, Send and Stop.

import { h, setAttr, setText } from "./dom.js";
import { mediaView } from "./conversation.js";
import { dialTones, readFiles } from "./media.js";
import { Media, modeOf } from "./request.js";
import { Options } from "./options.js";

const PLACES = {
  chat: "Ask about a picture, or anything else",
  speech: "Words that may help with names (optional)",
  picture: "This model reads the picture alone",
  text: "The text for the model's encoder",
};

/** `actions`: send(), stop(), reset(), changed(). */
export class Composer {
  constructor(actions) {
    this.media = [];
    this.models = [];
    this.actions = actions;
    this.model = h("select", { onchange: () => this.#modelChosen() });
    this.text = h("textarea", { rows: 2, "aria-label": "Your question", oninput: actions.changed, onkeydown: (event) => this.#key(event) });
    this.files = h("input", { type: "file", multiple: true, accept: "image/*,audio/*,video/*", class: "offscreen", tabindex: "-1", "aria-hidden": "true", onchange: () => this.#picked() });
    this.thumbs = h("ul", { class: "thumbs", "aria-label": "Added files" });
    this.notice = h("p", { class: "error", role: "alert" });
    this.dial = this.#dialer();
    this.send = h("button", { type: "submit", class: "primary" }, "Send");
    this.stop = h("button", { type: "button", class: "danger", hidden: true, onclick: actions.stop }, "Stop");
    this.options = new Options(actions.changed);
    this.node = h(
      "form", { class: "composer", noValidate: true, onsubmit: (event) => (event.preventDefault(), actions.send()) },
      this.thumbs, this.text, this.notice,
      h("div", { class: "row" },
        h("button", { type: "button", class: "quiet", onclick: () => this.files.click() }, "Add files"), this.files, this.dial,
        h("label", { class: "inline" }, h("span", { class: "offscreen" }, "Model"), this.model),
        h("span", { class: "actions" }, h("button", { type: "button", class: "quiet", onclick: actions.reset }, "New"), this.stop, this.send)),
      this.options.node,
    );
    this.#modelChosen();
  }

  get mode() {
    return modeOf(this.chosen);
  }

  get chosen() {
    return this.models.find((one) => one.id === this.model.value);
  }

  setModels(models) {
    const before = this.model.value;
    this.models = models;
    this.model.replaceChildren(...models.map((one) => h("option", { value: one.id }, one.id)));
    if (models.some((one) => one.id === before)) this.model.value = before;
    this.model.disabled = models.length === 0;
    if (!models.length) this.model.append(h("option", { value: "" }, "no model yet"));
    this.#modelChosen();
  }

  setBusy(busy) {
    this.stop.hidden = !busy;
    this.send.hidden = busy;
    setAttr(this.node, "aria-busy", busy ? "true" : null);
  }

  say(message) {
    setText(this.notice, message);
  }

  clear() {
    this.text.value = "";
    this.setMedia([]);
    this.say("");
  }

  setMedia(media) {
    this.media = media;
    this.thumbs.replaceChildren(...media.map((one) => this.#thumb(one)));
    this.actions.changed();
  }

  async addFiles(files) {
    try {
      const added = await readFiles(files);
      this.say("");
      this.setMedia([...this.media, ...added]);
    } catch (error) {
      this.say(error.message);
    }
  }

  #thumb(one) {
    const remove = () => {
      this.setMedia(this.media.filter((other) => other !== one));
      this.text.focus();
    };
    return h("li", {}, mediaView(one), h("button", { type: "button", class: "remove", "aria-label": `Remove ${one.name}`, onclick: remove }, "×"));
  }

  async #picked() {
    await this.addFiles(this.files.files);
    this.files.value = "";
  }

  #modelChosen() {
    this.options.show(this.mode);
    this.text.placeholder = PLACES[this.mode];
    this.dial.hidden = this.mode !== "speech";
    setText(this.send, this.mode === "speech" ? "Transcribe" : "Send");
    this.actions.changed();
  }

  /** Enter sends; Shift+Enter and an input method's Enter do not. */
  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    this.actions.send();
  }

  #dialer() {
    const digits = h("input", { type: "text", inputMode: "numeric", pattern: "[0-9]*", maxLength: 8, value: "5551234", size: 9, "aria-label": "Digits to dial" });
    const make = async () => {
      const dialled = digits.value.replace(/\D/g, "").slice(0, 8);
      if (dialled) this.setMedia([new Media("tones.wav", "audio/wav", await dialTones(dialled))]);
      else this.say("Write digits to dial.");
    };
    return h("span", { class: "dial" }, digits, h("button", { type: "button", class: "quiet", onclick: make }, "Dial tones"));
  }
}
