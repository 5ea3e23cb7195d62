// Sets the chosen theme before anything is drawn, so that nothing flashes.
"use strict";
try {
  const chosen = localStorage.getItem("kvkeep-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // without storage, follow the system's theme
}
