// A request from what the form holds: its path, its body, and nothing of the page.

/** A picture, video or sound that was added: `url` is its data: URL. */
export class Media {
  constructor(name, type, url) {
    this.name = name.replace(/[^\w.-]+/g, "_").slice(-60) || "file";
    this.type = type;
    this.url = url;
  }

  get isSound() {
    return this.type.startsWith("audio/");
  }

  get isVideo() {
    return this.type.startsWith("video/");
  }

  get base64() {
    return this.url.slice(this.url.indexOf(",") + 1);
  }

  /** What JSON.stringify makes of it. */
  toJSON() {
    return this.url;
  }
}

const takenBy = (model) => model?.input_modalities ?? ["text", "image"];

/** How a model is asked, by what GET /v1/models says that it takes. */
export function modeOf(model) {
  const takes = takenBy(model);
  return takes.length === 1 ? ({ image: "picture", audio: "speech" }[takes[0]] ?? "text") : "chat";
}

const PATHS = { chat: "v1/chat/completions", speech: "v1/audio/transcriptions", picture: "v1/completions", text: "v1/completions" };

/**
 * {path, body} or {path, form} of a request. `history`: messages before; `text`, `media`: what is asked now;
 * `options`: {system, sampling: {…}, tools, tool_choice, response_format, language}.
 */
export function makeRequest(model, history, text, media, options) {
  const mode = modeOf(model);
  const path = PATHS[mode];
  if (mode === "speech") return { path, form: speechForm(model, text, media, options) };
  const common = { model: model.id, stream: true, stream_options: { include_usage: true }, ...options.sampling };
  if (mode === "chat") return { path, body: chatBody(common, history, text, media, options) };
  const body = { ...common, ...(options.response_format ? { response_format: options.response_format } : {}) };
  if (mode === "picture") return { path, body: { ...body, multi_modal_data: { image: { url: media[0] } } } };
  return { path, body: { ...body, prompt: text } };
}

function chatBody(common, history, text, media, options) {
  const system = options.system ? [{ role: "system", content: options.system }] : [];
  const body = { ...common, messages: [...system, ...history, userMessage(text, media)] };
  if (options.tools) Object.assign(body, { tools: options.tools, tool_choice: options.tool_choice, parallel_tool_calls: false });
  if (options.response_format) body.response_format = options.response_format;
  return body;
}

export function userMessage(text, media) {
  if (!media.length) return { role: "user", content: text };
  const parts = media.map((one) => {
    const type = one.isVideo ? "video_url" : one.isSound ? "audio_url" : "image_url";
    return { type, [type]: { url: one } };
  });
  return { role: "user", content: [...parts, ...(text ? [{ type: "text", text }] : [])] };
}

function speechForm(model, text, media, options) {
  const form = { file: media[0], model: model.id, stream: "true" };
  if (options.language) form.language = options.language;
  if (text) form.prompt = text;
  for (const name of ["temperature", "seed"]) {
    if (name in options.sampling) form[name] = String(options.sampling[name]);
  }
  return form;
}

/** What is missing before a request can be sent; empty when nothing is. */
export function missing(model, text, media) {
  if (!model) return "No model is served yet.";
  const mode = modeOf(model);
  const sounds = media.filter((one) => one.isSound).length;
  if (mode === "speech") return sounds === 1 && media.length === 1 ? "" : "Add one sound file: this model writes speech down.";
  if (sounds && !takenBy(model).includes("audio")) return `${model.id} takes no sound: choose another model, or remove the file.`;
  if (mode === "picture") return media.length === 1 ? "" : "Add one picture: this model writes down what it shows.";
  if (mode === "text") return media.length ? `${model.id} takes text alone: remove the picture.` : text ? "" : "Write something.";
  return text || media.length ? "" : "Write a question, or add a picture.";
}

/** fetch's options for a request. */
export function fetchOptions(request, id, signal) {
  const headers = { "X-Request-ID": id };
  if (request.body) {
    return { method: "POST", signal, headers: { ...headers, "Content-Type": "application/json" }, body: JSON.stringify(request.body) };
  }
  const form = new FormData();
  for (const [name, value] of Object.entries(request.form)) {
    if (value instanceof Media) form.append(name, blobOf(value), value.name);
    else form.append(name, value);
  }
  return { method: "POST", signal, headers, body: form };
}

function blobOf(media) {
  const text = atob(media.base64);
  return new Blob([Uint8Array.from(text, (letter) => letter.charCodeAt(0))], { type: media.type });
}

/** What one event of an answer's stream brings: {text, reasoning, calls, finish, usage}; an Error where it is one. */
export function pieceOf(data) {
  const event = JSON.parse(data);
  if (event.error) throw new Error(String(event.error.message ?? "The server ended the answer with an error."));
  if (event.type === "transcript.text.delta") return { text: event.delta };
  if (event.type === "transcript.text.done") return { finish: "stop", sound: event.usage?.seconds };
  const choice = event.choices?.[0];
  return {
    text: choice?.delta?.content ?? choice?.text ?? "",
    reasoning: choice?.delta?.reasoning_content ?? choice?.delta?.reasoning ?? "",
    calls: choice?.delta?.tool_calls,
    finish: choice?.finish_reason,
    usage: event.usage,
  };
}
