// Before anything is drawn: the look that was chosen here, so that nothing flashes.
"use strict";
try {
  const chosen = localStorage.getItem("kvkeep-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // a browser that keeps nothing follows the system
}
