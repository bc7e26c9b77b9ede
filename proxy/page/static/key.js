// The dialog for the API key, and the mark that says whether there is one.

import { apiKey, setApiKey } from "./api.js";
import { setText } from "./dom.js";

const find = (id) => document.getElementById(id);
const WHY = "Only needed where this server asks for keys.";

/** Makes the header's button and the dialog work. */
export function setUpKey() {
  find("key-button").addEventListener("click", () => open(WHY));
  find("key-forget").addEventListener("click", () => use(""));
  find("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use(find("key-input").value.trim());
  });
  mark();
}

/** Opens the dialog with the server's words; not a second time over a dialog that is open. */
export function askForKey(why) {
  open(`${why}`);
}

function open(why) {
  setText(find("key-why"), why);
  const dialog = find("key-dialog");
  if (dialog.open) return;
  find("key-input").value = apiKey();
  dialog.showModal();
}

function use(key) {
  find("key-dialog").close();
  setApiKey(key);
  mark();
}

function mark() {
  const given = apiKey() !== "";
  find("key-dot").classList.toggle("good", given);
  find("key-button").title = given ? "An API key is in use in this tab" : "No API key is in use";
}
