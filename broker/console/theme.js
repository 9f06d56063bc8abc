// Sets the theme before the style sheet is read, so that no page flashes in the wrong theme.
try {
  document.documentElement.dataset.theme = localStorage.getItem("plainsong-theme") || "auto";
} catch {
  // Without local storage the theme follows the system.
}
