// Dark or light: as the system says, or as the reader has chosen.

const KEY = "triptych-colours";
const ORDER = ["system", "dark", "light"];
const SIGNS = { system: "◐", dark: "●", light: "○" };
const WORDS = { system: "as the system", dark: "dark", light: "light" };

function chosen() {
  try {
    const kept = localStorage.getItem(KEY);
    return ORDER.includes(kept) ? kept : "system";
  } catch {
    return "system";
  }
}

function use(choice, button) {
  if (choice === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = choice;
  if (!button) return;
  button.textContent = SIGNS[choice];
  button.setAttribute("aria-label", `Colours: ${WORDS[choice]}`);
  button.title = `Colours: ${WORDS[choice]}`;
}

/** Applies the choice, and makes the header's button go through the three. */
export function setUpTheme() {
  const button = document.getElementById("theme-button");
  let choice = chosen();
  use(choice, button);
  button?.addEventListener("click", () => {
    choice = ORDER[(ORDER.indexOf(choice) + 1) % ORDER.length];
    try {
      localStorage.setItem(KEY, choice);
    } catch {
      // The choice holds until the page is left.
    }
    use(choice, button);
  });
}
