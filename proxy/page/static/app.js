// The page's start: which view is shown, the colours, the key.

import { setUpKey } from "./key.js";
import { setUpTheme } from "./theme.js";
import { TryView } from "./try.js";
import { WatchView } from "./watch.js";

const find = (id) => document.getElementById(id);
const VIEWS = { try: { make: (root) => new TryView(root) }, watch: { make: (root) => new WatchView(root) } };
const TITLES = { try: "Try · Triptych", watch: "Watch · Triptych" };

/** Shows the view that the address names after #; a view is made when it is first shown. */
function route(focus) {
  const wanted = location.hash.slice(1);
  if (wanted === "main") return;
  const name = Object.hasOwn(VIEWS, wanted) ? wanted : "try";
  for (const [other, view] of Object.entries(VIEWS)) {
    if (other === name) continue;
    find(other).hidden = true;
    find(`tab-${other}`).removeAttribute("aria-current");
    if (view.shown) view.view?.hide?.();
    view.shown = false;
  }
  const view = VIEWS[name];
  find(name).hidden = false;
  find(`tab-${name}`).setAttribute("aria-current", "page");
  document.title = TITLES[name];
  view.view ??= view.make(find(name));
  if (!view.shown) view.view.show?.();
  view.shown = true;
  if (focus) find("main").focus({ preventScroll: true });
}

setUpTheme();
setUpKey();
addEventListener("hashchange", () => route(true));
route(false);
