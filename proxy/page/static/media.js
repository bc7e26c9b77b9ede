// Pictures, videos and sound: from files, from the clipboard, from the demo, and dial tones made here.

import { address } from "./api.js";
import { Media } from "./request.js";

/** Base64 adds a third; the server's default limit of a body is 64 MiB. */
const MAX_BYTES = 40 << 20;
const MAX_FILES = 16;
const TYPES = { wav: "audio/wav", flac: "audio/flac", mp3: "audio/mpeg", ogg: "audio/ogg", m4a: "audio/mp4", webm: "video/webm", mp4: "video/mp4", mov: "video/quicktime" };

/** The files as Media; throws an Error in plain words for what is no picture, video or sound. */
export async function readFiles(files) {
  if (files.length > MAX_FILES) throw new Error(`At most ${MAX_FILES} files at once.`);
  return Promise.all([...files].map(readFile));
}

async function readFile(file) {
  const type = file.type || TYPES[file.name.split(".").pop().toLowerCase()] || "";
  if (!/^(image|audio|video)\/[\w.+-]+$/.test(type)) throw new Error(`${file.name} is no picture, video or sound.`);
  if (file.size > MAX_BYTES) throw new Error(`${file.name} is larger than 40 MiB.`);
  return new Media(file.name, type, await dataUrl(file, type));
}

function dataUrl(blob, type) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(`data:${type};base64,${reader.result.slice(reader.result.indexOf(",") + 1)}`);
    reader.onerror = () => reject(new Error("The file cannot be read."));
    reader.readAsDataURL(blob);
  });
}

/** One of the demo's pictures. */
export async function demoPicture(name) {
  const reply = await fetch(address(`page/examples/${encodeURIComponent(name)}`));
  if (!reply.ok) throw new Error(`The demo's picture ${name} is missing.`);
  return new Media(name, "image/png", await dataUrl(await reply.blob(), "image/png"));
}

const RATE = 16000;
const LOW = [697, 770, 852, 941];
const HIGH = [1209, 1336, 1477];
const KEYPAD = ["123", "456", "789", " 0 "];

/** The digits as dial tones (DTMF), as the audio demo hears them: WAV of 16 bits. */
export function dialTones(digits) {
  const [lead, tone, gap] = [0.4, 0.15, 0.1];
  const samples = new Float32Array(Math.round((2 * lead + digits.length * (tone + gap)) * RATE));
  [...digits].forEach((digit, index) => {
    const row = KEYPAD.findIndex((line) => line.includes(digit));
    const column = KEYPAD[row].indexOf(digit);
    const first = Math.round((lead + index * (tone + gap)) * RATE);
    for (let at = 0; at < tone * RATE; at += 1) {
      const turn = (2 * Math.PI * at) / RATE;
      const shape = Math.min(1, at / 64, (tone * RATE - at) / 64);
      samples[first + at] = 0.4 * shape * (Math.sin(turn * LOW[row]) + Math.sin(turn * HIGH[column]));
    }
  });
  return wav(samples);
}

async function wav(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const word = (at, text) => [...text].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  word(0, "RIFF");
  view.setUint32(4, 36 + 2 * samples.length, true);
  word(8, "WAVEfmt ");
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  word(36, "data");
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((value, index) => view.setInt16(44 + 2 * index, Math.round(32767 * Math.max(-1, Math.min(1, value))), true));
  return dataUrl(new Blob([view.buffer]), "audio/wav");
}
