// The chosen colours, before anything is drawn: a classic script in the head, so that no page shows itself in other ones first.

const THEME_KEY = "baton-theme"; // in localStorage; dashboard.js writes it
document.documentElement.dataset.theme = "auto";
try {
  document.documentElement.dataset.theme = localStorage.getItem(THEME_KEY) ?? "auto";
} catch {
  // site data is blocked: nothing is remembered
}
